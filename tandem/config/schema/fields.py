# SPDX-License-Identifier: Apache-2.0
"""The building blocks of fields: types that accept verl's spellings, and read conditions.

Every field of the schema says what it does in its ``description``. A field that is read only under
a condition on other keys says so by ``read_if``. Keys that nothing reads are in ``ignored``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

SECTION = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
"""The settings of every section: it is frozen, and unknown keys are errors."""


class Section(BaseModel):
    """A section of the configuration that no other class extends."""

    model_config = SECTION


READ_IF = "read_if"
TRAINS = "trainer.val_only=False: nothing is trained, as trainer.val_only=True"
VALIDATES = "data.val_files!=[]: there is no validation, as data.val_files is empty"
"""Conditions that several sections state."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
_DEFAULT_SEED = 1
_UNSET = object()


def read_if(condition: str, also: str | None = None) -> JsonDict:
    """Return the ``json_schema_extra`` of a field, or of a section, that is not always read.

    Args:
        condition: ``NAME=VALUE|VALUE``, ``NAME!=VALUE|VALUE``, ``NAME>0`` or ``NAME<=0``. It may
            end with ``: `` and the reason to show if it does not hold. NAME is a key of the same
            section, else a key or a property from the root.
        also: a second condition, which must hold too.

    Example:
        >>> kl_coef: float = Field(default=0.1, json_schema_extra=read_if("use_kl_loss=True"))
    """
    return {READ_IF: [condition] if also is None else [condition, also]}


def _listed(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _listed_groups(value: Any) -> Any:
    return tuple(_listed(group) for group in value) if isinstance(value, list | tuple) else value  # pyright: ignore


def _module_rule(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        return tuple(part.strip(" '\"") for part in value[1:-1].split(","))  # a list in quotes
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore


def _dtype_name(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _seed(value: Any) -> Any:
    return _DEFAULT_SEED if value is None else value


def follow(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` with each unset key filled from the key that it follows, if that is set.

    Args:
        values: the keys that are set, by section.
        sources: key -> the key it follows, which may itself follow an earlier one.
    """
    filled: Any = dict(values)
    for key, source in sources.items():
        node: Any = filled
        for name in source.split("."):
            node = node.get(name, _UNSET) if isinstance(node, dict) else _UNSET  # pyright: ignore
        if node is not _UNSET:
            filled = _with_default(filled, key.split("."), value=node)
    return filled


def _with_default(node: Any, path: Sequence[str], *, value: Any) -> Any:
    """Return a copy of ``node`` with ``value`` at ``path``, unless it has a value there."""
    if not isinstance(node, dict):
        return node
    name, *below = path
    section = cast(dict[str, Any], node)
    if not below:
        return {name: value} | section
    return section | {name: _with_default(section.get(name, {}), below, value=value)}


Strings = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A list of strings; a single string is a list of one, null an empty list."""

StringGroups = Annotated[tuple[Strings, ...], BeforeValidator(_listed_groups)]
"""A list of groups of strings; a single string is a group of one."""

ModuleRule = Annotated[str | tuple[str, ...], BeforeValidator(_module_rule)]
"""A regular expression of whole names, or a list of last parts of names; ``all-linear`` is text."""

Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_dtype_name)]
"""A number format; ``auto`` is bfloat16 on accelerators and float32 on CPUs."""

Seed = Annotated[int, BeforeValidator(_seed)]
"""A seed; null means 1 (in verl, a constant of torch)."""

# Fields that several sections have.
Shuffles = Annotated[bool, Field(description="Draw the rows in a new random order in each epoch.")]
ShuffleSeed = Annotated[
    Seed,
    Field(
        ge=0,
        description="Seed of data.shuffle. null: 1.",
        json_schema_extra=read_if("shuffle=True"),
    ),
]
MaxTrainRows = Annotated[int, Field(ge=-1, description="Number of training rows to use; -1: all.")]
MaxValidationRows = Annotated[
    int,
    Field(
        ge=-1,
        description="Number of validation rows to use; -1: all.",
        json_schema_extra=read_if(VALIDATES),
    ),
]
LearningRate = Annotated[float, Field(ge=0, le=1, description="Peak learning rate of AdamW.")]
