# SPDX-License-Identifier: Apache-2.0
"""Assignments from YAML files: recipes, and files that users of verl name with ``--config-path``.

``defaults:`` lists are followed inside the folder of the file; verl's own entries (``ppo_trainer``)
mean verl's defaults (``schema.verl_defaults``). ``hydra:`` and ``_target_`` are skipped.
Interpolations are resolved later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, cast

from tandem.config.parse.grammar import Assignment, Mode
from tandem.config.parse.yaml_content import read_yaml
from tandem.config.schema.verl_defaults import VERL_DEFAULTS
from tandem.errors import UserError

MEGATRON = {
    "ppo": Assignment("actor_rollout_ref.actor.strategy", "megatron"),
    "sft": Assignment("engine", "megatron"),
}
"""The assignment that a name with "megatron" implies, by the command of the configuration."""

_SELF = "_self_"
_MISSING = "???"
_SKIPPED = frozenset({"defaults", "hydra", "_target_", "_convert_", "_recursive_", "_partial_"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """The assignments of a file in order, and the warnings about it."""

    assignments: tuple[Assignment, ...]
    warnings: tuple[str, ...]


def load_recipe(name: str) -> Loaded:
    """Load a recipe file.

    Raises:
        UserError: the file does not exist or is not a YAML mapping.
    """
    path = Path(os.path.expanduser(name))
    if not os.path.isfile(path):  # which a name that is too long is not
        raise UserError(
            repr(name), rule="no such recipe file", remedy="Check the path, or write key=value."
        )
    return _load(path, path.parent, mode=Mode.SET)


def load_named_configs(config_path: str, config_names: Sequence[str]) -> Loaded:
    """Load the file of ``--config-path`` and the last ``--config-name``, above verl's defaults.

    A missing file is a warning. Each name of one of verl's configurations gives its defaults. A
    name that contains "megatron" implies Megatron's engine. The file is written for verl, so
    unknown keys in it are warnings, not errors.
    """
    names = [name.removesuffix(".yaml") for name in config_names]
    defaults = tuple(chain.from_iterable(map(_verl_defaults, names)))
    loaded = _load_named(config_path, names[-1])
    return Loaded(defaults + loaded.assignments, loaded.warnings)


def _verl_defaults(name: str) -> tuple[Assignment, ...]:
    """Return the defaults of verl's configuration called ``name``; none if it is not verl's."""
    values = VERL_DEFAULTS.get(name, {})
    return tuple(
        Assignment(key, value, Mode.DEFAULT, f"verl's {name}") for key, value in values.items()
    )


def _load_named(config_path: str, name: str) -> Loaded:
    path = Path(os.path.expanduser(config_path)) / f"{name}.yaml"
    is_file = path.is_file() and (bool(config_path) or name not in VERL_DEFAULTS)
    implied: tuple[Assignment, ...] = ()
    warnings: tuple[str, ...] = ()
    if "megatron" in name:
        implied = (MEGATRON["sft" if name.startswith("sft") else "ppo"],)
        warnings = (f"--config-name={name}: implies {implied[0].name}=megatron",)
    if name in VERL_DEFAULTS and not is_file:
        return Loaded(implied, warnings)
    if not is_file:
        missing = f"--config-name={name}: {path} does not exist; the built-in defaults are used"
        return Loaded(implied, (missing, *warnings))
    loaded = _load(path, path.parent, mode=Mode.ADD)
    return Loaded(implied + loaded.assignments, warnings + loaded.warnings)


def _load(path: Path, folder: Path, *, mode: Mode, above: tuple[Path, ...] = ()) -> Loaded:
    """Load a file after its ``defaults:``, or where ``_self_`` is in their list."""
    if path in above:
        raise UserError(
            repr(str(path)),
            rule="its defaults: include the file itself",
            remedy="Remove that entry.",
        )
    content = _read(path)
    listed: object = content.get("defaults") or []
    if not isinstance(listed, list):
        raise UserError(
            repr(str(path)), rule="defaults: must be a list of names", remedy="Correct the file."
        )
    entries = cast(list[Any], listed)
    names = [entry for entry in entries if entry != _SELF]
    position = entries.index(_SELF) if _SELF in entries else len(names)
    parts = [
        _load_default(name, folder, mode=mode, above=(*above, path)) for name in _pairs(names, path)
    ]
    values = cast(dict[str, Any], _cleaned(content))
    for name in values:
        if not isinstance(cast(object, name), str):
            raise UserError(
                repr(str(path)), rule=f"the key {name!r} is no text", remedy="Correct the file."
            )
    own = tuple(Assignment(name, value, mode, str(path)) for name, value in values.items())
    parts.insert(position, Loaded(own, ()))
    return Loaded(
        tuple(assignment for part in parts for assignment in part.assignments),
        tuple(warning for part in parts for warning in part.warnings),
    )


def _pairs(entries: list[Any], path: Path) -> Iterator[tuple[str, str]]:
    """Yield the entries of a ``defaults:`` list as (group, name); a bare name has the group ""."""
    for entry in entries:
        pair = cast(dict[str, Any], entry) if isinstance(entry, dict) else {"": entry}
        if len(pair) != 1 or not isinstance(next(iter(pair.values())), str | None):
            raise UserError(
                repr(str(path)),
                rule=f"{entry!r} in defaults: must be group: name",
                remedy="Correct the file.",
            )
        for group, name in pair.items():
            yield str(group).removeprefix("override ").removeprefix("optional "), name or ""


def _load_default(
    entry: tuple[str, str], folder: Path, *, mode: Mode, above: tuple[Path, ...]
) -> Loaded:
    """Load an entry of ``defaults:``, e.g. ``name``, ``group: name`` or ``group@package: name``."""
    group, name = entry
    place, _, package = group.partition("@")
    path = folder / place / f"{name}.yaml"
    if path.is_file():
        loaded = _load(path, folder, mode=mode, above=above)
        return _below(loaded, package or place.replace("/", "."))
    if not name or name in VERL_DEFAULTS or place.startswith("hydra"):
        return Loaded(_verl_defaults(name), ())
    return Loaded((), (f"defaults: {path} does not exist; the built-in defaults are used",))


def _below(loaded: Loaded, package: str) -> Loaded:
    if package in ("", "_global_"):
        return loaded
    moved = tuple(
        replace(assignment, name=f"{package}.{assignment.name}")
        for assignment in loaded.assignments
    )
    return Loaded(moved, loaded.warnings)


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(str(path), resolved=False)
    if not isinstance(content, dict):
        raise UserError(
            repr(str(path)),
            rule="must hold keys and values (key: value)",
            remedy="Correct the file.",
        )
    return cast(dict[str, Any], content)


def _cleaned(value: Any) -> Any:
    """Return ``value`` without keys that only Hydra reads, and without missing values (``???``)."""
    if not isinstance(value, dict):
        return value
    entries = cast(dict[str, Any], value).items()
    return {k: _cleaned(v) for k, v in entries if k not in _SKIPPED and v != _MISSING}
