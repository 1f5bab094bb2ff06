# SPDX-License-Identifier: Apache-2.0
"""The user's reward functions: where they are, and how each is called.

A function is recognised by the names of its parameters. verl's function of one response, verl's
function of a batch, and TRL's function of prompts and completions are supported. This file loads
foreign code, and is therefore called inside reward processes only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tandem.config.schema.imports import import_object
from tandem.errors import UserError
from tandem.types import RewardRequest

_SECTION = "custom_reward_function"


class Signature(Enum):
    """The ways to call a reward function; the value lists the arguments, which go by name."""

    SAMPLE = ("data_source", "solution_str", "ground_truth", "extra_info")
    BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    NAMED = ("response", "prompt", "ground_truth", "extra_info", "data_source")
    """One response; the function gets those that it names."""
    COLUMNS = ("prompts", "completions")
    """TRL's. Columns of the data follow as keyword arguments."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of the reward.

    Attributes:
        path: a Python file, ``pkg://package.module``, ``package.module:function``, or the file of
            a pickled function.
        name: the name of the function in that file or module, and of its part in metrics.
        weight: the factor of its score in the sum of several functions.
        reward_kwargs: further keyword arguments.

    Example:
        >>> RewardFunction("reward.py", "right_format", weight=0.2)
    """

    path: str
    name: str
    weight: float = 1.0
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """A reward function with its signature.

    Attributes:
        is_async: whether a call must be awaited.
    """

    spec: RewardFunction
    call: Callable[..., Any]
    signature: Signature
    is_async: bool = False

    @property
    def takes_groups(self) -> bool:
        """Whether one call scores several responses."""
        return self.signature in (Signature.BATCH, Signature.COLUMNS)

    @property
    def file(self) -> str | None:
        """The file that defines the function, if it is known."""
        function = inspect.unwrap(self.call)
        code = getattr(function, "__code__", None) or getattr(
            type(function).__call__, "__code__", None
        )
        return None if code is None else code.co_filename

    def arguments(self, requests: Sequence[RewardRequest]) -> dict[str, Any]:
        """Return the keyword arguments of a call for one request, or for several."""
        if self.signature is Signature.COLUMNS:
            return {**_known_to(self.call, _columns(requests)), **self.spec.reward_kwargs}
        if self.signature is Signature.NAMED:
            named = _known_to(self.call, _named_values(requests[0]))
            return {**named, **self.spec.reward_kwargs}
        given: Sequence[Any] = [
            (row.data_source, row.solution, row.ground_truth, dict(row.extra_info))
            for row in requests
        ]
        values = map(list, zip(*given, strict=True)) if self.takes_groups else given[0]
        return {**dict(zip(self.signature.value, values, strict=True)), **self.spec.reward_kwargs}


def load_function(
    spec: RewardFunction, *, needs_batch: bool = False, is_one_of_several: bool = False
) -> LoadedFunction:
    """Import a function and find its signature.

    Args:
        needs_batch: whether functions of one response are refused (``reward_manager=batch``).
        is_one_of_several: whether it gets only those of ``reward_kwargs`` that it takes.

    Raises:
        UserError: the file is missing or does not import, or the function is missing or cannot be
            called with the arguments of a signature.
    """
    function = import_object(_SECTION, spec.path, name=spec.name)
    signature = _signature_of(function)
    if needs_batch and signature in (Signature.SAMPLE, Signature.NAMED):
        raise UserError(
            f"{_SECTION}.name",
            spec.name,
            rule="scores one response, and reward_manager=batch needs a function of "
            f"({', '.join(Signature.BATCH.value)})",
            remedy="Change its parameters, or leave reward_manager out.",
        )
    if is_one_of_several:
        spec = replace(spec, reward_kwargs=_known_to(function, spec.reward_kwargs))
    _check_arguments(function, spec, signature=signature)
    return LoadedFunction(spec, function, signature, _is_async(function))


def _is_async(function: Callable[..., Any]) -> bool:
    is_async = inspect.iscoroutinefunction
    return is_async(function) or is_async(getattr(function, "__call__", None))  # noqa: B004


def _signature_of(function: Callable[..., Any]) -> Signature:
    names = _parameters(function) or {}
    if "completions" in names:
        return Signature.COLUMNS
    if "response" in names:
        return Signature.NAMED
    return Signature.BATCH if "solution_strs" in names else Signature.SAMPLE


def _check_arguments(
    function: Callable[..., Any], spec: RewardFunction, *, signature: Signature
) -> None:
    """Raise UserError if a call cannot succeed. Columns of the data are not known here."""
    if signature is Signature.COLUMNS or _parameters(function) is None:
        return
    values: Mapping[str, Any] = dict.fromkeys(signature.value)
    if signature is Signature.NAMED:
        values = _known_to(function, values)
    arguments = {**values, **spec.reward_kwargs}
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{_SECTION}.name",
            spec.name,
            rule=f"cannot be called with {', '.join(arguments)}: {error}",
            remedy="Change its parameters or reward_kwargs.",
        ) from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function; None for a builtin without a signature."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return None


def _named_values(request: RewardRequest) -> dict[str, Any]:
    """Return the arguments by the names of ``Signature.NAMED``."""
    return {
        "response": request.solution,
        "prompt": request.prompt,
        "ground_truth": request.ground_truth,
        "extra_info": dict(request.extra_info),
        "data_source": request.data_source,
    }


def _columns(requests: Sequence[RewardRequest]) -> dict[str, list[Any]]:
    """Return TRL's arguments: lists with one entry per response."""
    names = dict.fromkeys(name for row in requests for name in row.extra_info)
    chats = [not isinstance(row.prompt, str) for row in requests]
    return {
        **{str(name): [row.extra_info.get(name) for row in requests] for name in names},
        "data_source": [row.data_source for row in requests],
        "ground_truth": [row.ground_truth for row in requests],
        "extra_info": [dict(row.extra_info) for row in requests],
        "prompts": [row.prompt for row in requests],
        "completions": [
            [{"role": "assistant", "content": row.solution}] if is_chat else row.solution
            for row, is_chat in zip(requests, chats, strict=True)
        ],
    }


def _known_to(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that ``function`` takes: all of them if it has ``**kwargs``."""
    parameters = _parameters(function) or {}
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}
