# SPDX-License-Identifier: Apache-2.0
"""Interpolations ``${...}`` in values: other keys (``${trainer.nnodes}``), now, env and oc.env."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import BaseModel

from tandem.config.schema.ignored import ignored_table
from tandem.errors import UserError

Tree = dict[str, Any]


def put(tree: Tree, name: str, *, value: Any) -> None:
    """Set the dotted key ``name`` of a tree, and create missing sections above it."""
    *sections, last = name.split(".")
    node = tree
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[last] = value


def resolve(schema: type[BaseModel], tree: Tree) -> Tree:
    """Return a copy of ``tree`` with resolved interpolations, which may refer to defaults.

    Raises:
        UserError: an interpolation refers to a key that does not exist.
    """
    if not has_interpolation(tree):
        return tree
    OmegaConf.register_new_resolver("now", _now, replace=True)
    OmegaConf.register_new_resolver("env", oc.env, replace=True)
    defaults = schema().model_dump()
    for name, (default, _) in ignored_table(schema).items():
        put(defaults, name, value=default)
    full = OmegaConf.create(_merged(defaults, tree))
    return _resolved(tree, full, name="")


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def has_interpolation(value: Any) -> bool:
    """Return whether a value, or anything below it, contains ``${...}``."""
    if isinstance(value, Mapping):
        return any(has_interpolation(entry) for entry in cast(Mapping[str, Any], value).values())
    if isinstance(value, list | tuple):
        return any(has_interpolation(entry) for entry in cast(list[Any], value))
    return isinstance(value, str) and "${" in value


def _merged(defaults: Any, tree: Any) -> Any:
    if not isinstance(defaults, dict) or not isinstance(tree, dict):
        return tree
    ours, theirs = cast(Tree, defaults), cast(Tree, tree)
    return ours | {name: _merged(ours.get(name), value) for name, value in theirs.items()}


def _resolved(value: Any, node: Any, *, name: str) -> Any:
    """Return ``value`` with each interpolated leaf replaced by its resolved value in ``node``."""
    if isinstance(value, dict):
        entries = cast(Tree, value)
        return {
            key: _resolved(entry, node, name=f"{name}.{key}" if name else key)
            for key, entry in entries.items()
        }
    if not has_interpolation(value):
        return value
    try:
        found = OmegaConf.select(node, name, throw_on_resolution_failure=True)
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except OmegaConfBaseException as error:
        cause = str(error).splitlines()[0]
        raise UserError(
            name,
            value,
            rule=f"cannot be resolved ({cause})",
            remedy="Write the value itself.",
        ) from error
