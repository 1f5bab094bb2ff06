# SPDX-License-Identifier: Apache-2.0
"""YAML files as assignments: recipes, and the files that verl's users name with ``--config-path``.

``defaults:`` lists are followed inside the file's folder; verl's own entries (``ppo_trainer``) mean
the built-in defaults. ``hydra:`` and ``_target_`` are skipped. Interpolations are resolved later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tandem.config.grammar import Assignment, Mode
from tandem.errors import UserError

BUILT_IN = frozenset(
    {
        "ppo_trainer",
        "ppo_megatron_trainer",
        "sft_trainer",
        "sft_trainer_engine",
        "sft_trainer_megatron",
    }
)
"""Names of verl's own configurations, whose keys and defaults are the schema's."""

MEGATRON_STRATEGY = Assignment("actor_rollout_ref.actor.strategy", "megatron")

_SELF = "_self_"
_MISSING = "???"
_SKIPPED = frozenset({"defaults", "hydra", "_target_", "_convert_", "_recursive_", "_partial_"})


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a file says, in order, and what must be told about it."""

    assignments: tuple[Assignment, ...]
    warnings: tuple[str, ...]


def load_recipe(name: str) -> Loaded:
    """A recipe file.

    Raises:
        UserError: it does not exist or is no YAML mapping.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{name!r}: no such recipe file. Check the path, or write key=value.")
    return _load(path, path.parent, mode=Mode.SET)


def load_named_config(config_path: str, config_name: str) -> Loaded:
    """The file of ``--config-path`` and ``--config-name``; a missing one is only warned of.

    A name that speaks of Megatron implies ``strategy=megatron``. Such files are written for verl:
    keys that are unknown here are warned of, not refused.
    """
    name = config_name.removesuffix(".yaml")
    path = Path(config_path).expanduser() / f"{name}.yaml"
    implied: tuple[Assignment, ...] = ()
    warnings: tuple[str, ...] = ()
    if "megatron" in name:
        implied = (MEGATRON_STRATEGY,)
        warnings = (f"--config-name={name}: implies {MEGATRON_STRATEGY.name}=megatron",)
    if name in BUILT_IN and not path.is_file():
        return Loaded(implied, warnings)
    if not path.is_file():
        missing = f"--config-name={name}: {path} does not exist; the built-in defaults are used"
        return Loaded(implied, (missing, *warnings))
    loaded = _load(path, path.parent, mode=Mode.ADD)
    return Loaded(implied + loaded.assignments, warnings + loaded.warnings)


def _load(path: Path, folder: Path, *, mode: Mode) -> Loaded:
    """A file with its ``defaults:``, which come before its values unless ``_self_`` says else."""
    content = _read(path)
    entries: list[Any] = list(content.get("defaults") or [])
    if _SELF not in entries:
        entries.append(_SELF)
    own = Loaded(tuple(Assignment(k, v, mode, str(path)) for k, v in _cleaned(content).items()), ())
    parts = [
        own if entry == _SELF else _load_default(entry, folder, mode=mode) for entry in entries
    ]
    return Loaded(
        tuple(assignment for part in parts for assignment in part.assignments),
        tuple(warning for part in parts for warning in part.warnings),
    )


def _load_default(entry: Any, folder: Path, *, mode: Mode) -> Loaded:
    """One entry of a ``defaults:`` list: ``name``, ``group: name`` or ``group@package: name``."""
    if isinstance(entry, Mapping):
        ((group, option),) = cast(Mapping[str, Any], entry).items()
    else:
        group, option = "", str(entry)
    group = group.removeprefix("override ").removeprefix("optional ")
    place, _, package = group.partition("@")
    path = folder / place / f"{option}.yaml"
    if path.is_file():
        return _below(_load(path, folder, mode=mode), package or place.replace("/", "."))
    if option is None or option in BUILT_IN:
        return Loaded((), ())
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
    try:
        loaded = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{str(path)!r}: not a readable YAML file ({cause}). Mend it.") from error
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{str(path)!r}: must hold keys and values (key: value). Mend it.")
    return cast(dict[str, Any], OmegaConf.to_container(loaded, resolve=False))


def _cleaned(value: Any) -> Any:
    """Without what only Hydra reads, and without values that are marked as missing."""
    if not isinstance(value, dict):
        return value
    entries = cast(dict[str, Any], value).items()
    return {k: _cleaned(v) for k, v in entries if k not in _SKIPPED and v != _MISSING}
