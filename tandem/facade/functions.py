# SPDX-License-Identifier: Apache-2.0
"""Python functions as files, which reward processes load.

A function of an importable module is stored as its name; a function of a notebook or a script is
stored itself, with the globals that it uses. The name of its file has a digest of it, so that a run
is not continued with another function. An edited module is warned of.
"""

from __future__ import annotations

import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, cast

import cloudpickle

from tandem.config.schema.imports import PICKLE_SUFFIX
from tandem.errors import UserError
from tandem.facade.identity import MAIN_MODULES, CachedInScript, identity_of
from tandem.facade.rows import DIGEST_LENGTH, INPUTS_FOLDER, digest, write_whole

logger = logging.getLogger(__name__)

Reward = Callable[..., Any] | str | tuple[Callable[..., Any] | str, float]
Rewards = Reward | Mapping[str, Reward] | Iterable[Reward]


def reward_keys(rewards: Rewards, *, folder: Path) -> dict[str, Any]:
    """Return the keys of reward functions, after writing those that are Python objects.

    Args:
        folder: the run folder.

    Raises:
        UserError: there is no entry, or one is not a function with a weight, or cannot be sent to
            another process, or two share a name.
    """
    paths: list[str] = []
    weights: list[float] = []
    named = _named(rewards)
    if not named:
        rule = "there is no function"
        raise UserError("rewards", rule=rule, remedy="Leave rewards out for the built-in rules.")
    _require_different([name for name, entry in named if not _is_path(entry)])
    for name, entry in named:
        function, weight = entry if _has_weight(entry) else (entry, 1.0)
        paths.append(_path(name, function, folder=folder))
        weights.append(float(weight))
    is_sum = any(weight != 1.0 for weight in weights)
    return {
        "custom_reward_function.path": paths,
        **({"custom_reward_function.weights": weights} if is_sum else {}),
    }


def _named(rewards: Rewards) -> list[tuple[str, Any]]:
    if isinstance(rewards, Mapping):
        return list(cast(Mapping[str, Any], rewards).items())
    is_one = callable(rewards) or isinstance(rewards, str) or _has_weight(rewards)
    is_one = is_one or not isinstance(rewards, Iterable)
    entries: list[Any] = [rewards] if is_one else list(cast(Iterable[Any], rewards))
    return [(_name(entry), entry) for entry in entries]


def _has_weight(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], Real)


def _name(entry: Any) -> str:
    function = entry[0] if isinstance(entry, tuple) else entry
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "reward"


def _is_path(entry: Any) -> bool:
    return isinstance(entry[0] if isinstance(entry, tuple) else entry, str)


def _require_different(names: list[str]) -> None:
    """Raise UserError if two functions share a name, by which their metrics are told apart."""
    for name in (name for name in names if names.count(name) > 1):
        raise UserError(
            "rewards",
            rule=f"two functions have the name {name!r} (a lambda has none of its own)",
            remedy='Give a dict with a name for each: rewards={"right": ..., "short": ...}.',
        )


def _path(name: str, function: Any, *, folder: Path) -> str:
    if isinstance(function, str):
        return function
    if not callable(function):
        raise UserError(
            f"rewards[{name!r}]",
            function,
            rule="is not a function",
            remedy="Give a function, or a pair of a function and its weight.",
        )
    if not name.isidentifier():
        raise UserError("rewards", name, rule="is not a name", remedy="Use letters, digits and _.")
    content, identity, holds_code = _pickled(name, function)
    path = folder / INPUTS_FOLDER / f"{name}-{identity[:DIGEST_LENGTH]}{PICKLE_SUFFIX}"
    write_whole(path, content)
    if not holds_code:
        _warn_if_edited(function, path.with_suffix(".source"))
    return f"{path}:{name}"


def _pickled(name: str, function: Any) -> tuple[bytes, str, bool]:
    """Return the pickle of a function, its digest, and whether it holds code."""
    key = f"rewards[{name!r}]"
    try:
        _store_main_module_whole()
        identity, holds_code = identity_of(function)
        return cloudpickle.dumps(function), identity, holds_code
    except CachedInScript as error:
        raise UserError(
            key,
            rule=f"it uses {error}, which functools.lru_cache wraps and other processes import",
            remedy=f"Define {error} in a module that the script imports, or without lru_cache.",
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            key,
            rule=f"the function cannot be sent to another process ({error})",
            remedy="Make connections, locks and models inside the function, or in a module that it "
            "imports.",
        ) from error


def _store_main_module_whole() -> None:
    """Make cloudpickle store what a script defines where multiprocessing has given it a name."""
    for module in (sys.modules[name] for name in MAIN_MODULES[1:] if name in sys.modules):
        cloudpickle.register_pickle_by_value(module)


def _warn_if_edited(function: Any, record: Path) -> None:
    """Warn if the file of a function that is stored as its name differs from that in ``record``."""
    try:
        file = inspect.getsourcefile(function if inspect.isroutine(function) else type(function))
        source = b"" if file is None else Path(file).read_bytes()
    except (TypeError, OSError):  # a function of C, or one without a file
        return
    now = digest(source)
    if record.exists() and record.read_text(encoding="utf-8") != now:
        logger.warning(
            "%s has changed since the last start in this folder, and rewards are computed by the "
            "changed one",
            file,
        )
    write_whole(record, now.encode())
