# SPDX-License-Identifier: Apache-2.0
"""Loading of a typed configuration: defaults, then files, then overrides; the later wins.

An unknown key is an error that names the nearest key; with ``+`` it is a warning. Two spellings of
a key with different values in one place are an error. Every error is one line with key, value, rule
and remedy. Rules between keys are checked in ``check.rules``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from tandem.config.parse.aliases import canonical_name
from tandem.config.parse.grammar import Assignment, Mode, parse_arguments
from tandem.config.parse.interpolation import Tree, has_interpolation, put, resolve
from tandem.config.parse.keys import find_key, is_section, keys_of, nearest_key
from tandem.config.parse.messages import (
    contradiction,
    describe,
    empty_value,
    not_a_number,
    unknown_key,
)
from tandem.config.parse.yaml_files import Loaded, load_named_config, load_recipe
from tandem.config.schema.ignored import ignored_table
from tandem.errors import UserError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

_COMMAND_LINE = Assignment("", None).source


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[ConfigT]):
    """A configuration and the keys that were set.

    Attributes:
        config: the typed configuration.
        set_keys: each key that a file or the command line set -> its spelling there.
        unknown_keys: the keys that the schema does not define; each was passed with ``+``.
        warnings: the warnings, one line each.
    """

    config: ConfigT
    set_keys: Mapping[str, str]
    unknown_keys: tuple[str, ...]
    warnings: tuple[str, ...]


def load_config(schema: type[ConfigT], arguments: Sequence[str]) -> LoadedConfig[ConfigT]:
    """Parse the arguments of a command into a configuration.

    Args:
        schema: ``RunConfig`` or ``SftConfig``.
        arguments: recipe files, overrides, ``--config-path`` and ``--config-name``.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of range, two spellings of a
            key with different values, an unreadable file.

    Example:
        >>> load_config(RunConfig, ["algorithm.adv_estimator=rloo"]).config.algorithm.adv_estimator
        'rloo'
    """
    line = parse_arguments(arguments)
    files = [load_recipe(name) for name in line.recipes]
    if line.config_name:
        files.insert(0, load_named_config(line.config_path, line.config_name))
    written = _Written(schema)
    for assignment in (*_assignments_of(files), *line.overrides):
        written.add(assignment)
    written.require_agreement()
    tree = resolve(schema, written.tree)
    config = _build(schema, _without(tree, ignored_table(schema)))
    return LoadedConfig(
        config=config,
        set_keys=dict(written.spellings),
        unknown_keys=tuple(written.unknown),
        warnings=(*(w for file in files for w in file.warnings), *written.warnings),
    )


def _assignments_of(files: Sequence[Loaded]) -> Iterator[Assignment]:
    for file in files:
        yield from file.assignments


class _Written:
    """The assignments that were added: a sparse tree of values, and the spelling of each key."""

    def __init__(self, schema: type[BaseModel]) -> None:
        self._schema = schema
        self.tree: Tree = {}
        self.spellings: dict[str, str] = {}
        self._latest: dict[str, dict[str, Assignment]] = {}
        self.unknown: dict[str, None] = {}
        self.warnings: list[str] = []

    def add(self, assignment: Assignment) -> None:
        """Add one assignment. Raise UserError if its key is unknown."""
        if assignment.name.partition(".")[0] == "hydra":
            return
        name = canonical_name(self._schema, assignment.name)
        if is_section(self._schema, name) and assignment.mode is not Mode.RESET:
            self._add_section(name, assignment)
        elif not is_section(self._schema, name) and find_key(self._schema, name) is None:
            self._add_unknown(assignment)
        elif assignment.mode is Mode.RESET:
            self._reset(name)
        else:
            self._add_value(name, assignment)

    def require_agreement(self) -> None:
        """Raise UserError if two spellings of a key have different values in its latest source.

        The command line overrides files, but neither may contradict itself. Interpolations
        (``${...}``) are not compared.
        """
        for name, by_spelling in self._latest.items():
            given = [one for one in by_spelling.values() if not has_interpolation(one.value)]
            for other in given[1:]:
                if other.value != given[0].value:
                    raise contradiction(given[0], other, name=name)

    def _add_section(self, name: str, assignment: Assignment) -> None:
        if not isinstance(assignment.value, Mapping):
            below = [key for key in keys_of(self._schema) if key.startswith(f"{name}.")]
            raise UserError(
                assignment.name,
                assignment.value,
                rule="is a section, not a key",
                remedy=f"Set one of its keys, e.g. {below[0]}.",
            )
        entries = cast(Mapping[str, Any], assignment.value)  # pyright: ignore[reportUnknownMemberType]
        for part, value in entries.items():
            self.add(replace(assignment, name=f"{assignment.name}.{part}", value=value))

    def _add_unknown(self, assignment: Assignment) -> None:
        name = assignment.name
        nearest = nearest_key(self._schema, name)
        if assignment.mode is not Mode.ADD:
            raise unknown_key(assignment, nearest)
        if name not in self.unknown:
            place = "" if assignment.source == _COMMAND_LINE else f" ({assignment.source})"
            self.warnings.append(f"{name}{place}: unknown, has no effect; nearest key: {nearest}")
        self.unknown[name] = None

    def _add_value(self, name: str, assignment: Assignment) -> None:
        if assignment.value == "":
            raise empty_value(self._schema, name)
        key = find_key(self._schema, name)
        if key is not None and key.is_number and isinstance(assignment.value, bool):
            raise not_a_number(key, assignment.value)
        if name != assignment.name and name not in self.spellings:
            self.warnings.append(f"{assignment.name} is read as {name}")
        self.spellings[name] = assignment.name
        self._keep(name, assignment)
        put(self.tree, name, value=assignment.value)

    def _keep(self, name: str, assignment: Assignment) -> None:
        """Keep the latest value of each spelling, from the latest source only."""
        by_spelling = self._latest.setdefault(name, {})
        if any(other.source != assignment.source for other in by_spelling.values()):
            by_spelling.clear()
        by_spelling[assignment.name] = assignment

    def _reset(self, name: str) -> None:
        for known in [k for k in self.spellings if k == name or k.startswith(f"{name}.")]:
            del self.spellings[known], self._latest[known]
        *sections, last = name.split(".")
        node = self.tree
        for section in sections:
            node = node.get(section, {})
        node.pop(last, None)


def _without(tree: Tree, names: Container[str], *, prefix: str = "") -> Tree:
    """Return a copy of ``tree`` without the keys ``names`` and without sections that are empty."""
    kept: Tree = {}
    for part, value in tree.items():
        name = f"{prefix}{part}"
        if name in names:
            continue
        if not isinstance(value, dict) or not value:
            kept[part] = value
        elif below := _without(cast(Tree, value), names, prefix=f"{name}."):
            kept[part] = below
    return kept


def _build(schema: type[ConfigT], tree: Tree) -> ConfigT:
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise describe(schema, error, tree=tree) from error
