# SPDX-License-Identifier: Apache-2.0
"""Loading of a typed configuration: defaults, then files, then overrides; the later wins.

An unknown key is an error that names the nearest key; with ``+`` it is a warning. Two spellings of
a key with different values in one place are an error. Every error is one line with key, value, rule
and remedy. Rules between keys are checked in ``check.rules``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from operator import attrgetter
from pathlib import PurePath
from typing import Any, Generic, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from pydantic import BaseModel, ValidationError

from tandem.config.parse.grammar import Assignment, Mode, parse_arguments
from tandem.config.parse.keys import (
    Key,
    canonical_name,
    find_key,
    in_override_grammar,
    is_section,
    keys_of,
    nearest_key,
)
from tandem.config.parse.messages import (
    contradiction,
    describe,
    empty_value,
    not_a_number,
    not_built,
    unknown_key,
)
from tandem.config.parse.names import ALIASES, chooses_built_option
from tandem.config.parse.separate import with_separate_devices
from tandem.config.parse.yaml_content import short_cause
from tandem.config.parse.yaml_files import Loaded, load_named_configs, load_recipe
from tandem.config.schema.ignored import ignored_table
from tandem.config.schema.megatron import (
    MEGATRON_IGNORED,
    SPELLINGS,
    STRATEGY,
    in_words_of_megatron,
    is_closed,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.verl_defaults import LORA, LORA_OF_MEGATRON, is_unset_by_null
from tandem.errors import UserError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

Tree = dict[str, Any]
_COMMAND_LINE = Assignment("", None).source
_KEYS = "keys"
_NULL, _OTHER_DEFAULT, _READ_DEFAULT, _GIVEN = range(4)
"""The precedence of the values of two spellings in one place, the lowest first."""


@dataclass(frozen=True, slots=True)
class LoadedConfig(Generic[ConfigT]):
    """A configuration and the keys that were set.

    Attributes:
        config: the typed configuration.
        set_keys: each key that a file or the command line set -> its spelling there.
        unknown_keys: the keys that the schema does not define; each was passed with ``+``.
        warnings: the warnings, one line each.
        verl_defaults: each key that has a default of verl instead of the schema's -> that value.
            The key is not in ``set_keys``, nor in the ``model_fields_set`` of its section.
        unread: each key of ``set_keys`` that the configuration does not hold -> its value.
        follows_verl: whether the command or a file names one of verl's configurations.
    """

    config: ConfigT
    set_keys: Mapping[str, str]
    unknown_keys: tuple[str, ...]
    warnings: tuple[str, ...]
    verl_defaults: Mapping[str, Any] = field(default_factory=dict[str, Any])
    unread: Mapping[str, Any] = field(default_factory=dict[str, Any])
    follows_verl: bool = False


def load_config(
    schema: type[ConfigT],
    arguments: Sequence[str],
    *,
    values: Mapping[str, Any] | None = None,
) -> LoadedConfig[ConfigT]:
    """Parse the arguments of a command into a configuration.

    Args:
        schema: ``RunConfig`` or ``SftConfig``.
        arguments: recipe files, overrides, ``--config-path`` and ``--config-name``.
        values: keys with Python values, which win over ``arguments``.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of range, two spellings of a
            key with different values, an unreadable file.

    Example:
        >>> load_config(RunConfig, ["algorithm.adv_estimator=rloo"]).config.algorithm.adv_estimator
        'rloo'
    """
    line = parse_arguments(arguments)
    files = [load_recipe(name) for name in line.recipes]
    if line.config_names:
        files.insert(0, load_named_configs(line.config_path, line.config_names))
    assignments = (*_assignments_of(files), *line.overrides, *_given(values or {}))
    written = _write(schema, assignments, spellings=ALIASES)
    if written.follows_megatron:
        written = _write(schema, assignments, spellings={**ALIASES, **SPELLINGS})
    written.require_agreement()
    written.require_followed()
    tree = _resolve(schema, written.tree)
    _require_built(schema, tree, spellings=written.spellings)
    try:
        config = _build(schema, _read(schema, tree), defaults=written.defaults)
        own_warnings: tuple[str, ...] = ()
        if isinstance(config, RunConfig):
            config, became = with_separate_devices(config)
            own_warnings = (became,) if became else ()
    except UserError as error:
        raise _as_written(error, written.spellings) from error
    return LoadedConfig(
        config=config,
        set_keys=dict(written.spellings),
        unknown_keys=tuple(written.unknown),
        warnings=(*(w for file in files for w in file.warnings), *written.warnings, *own_warnings),
        verl_defaults=written.defaults,
        unread={
            name: _value_at(tree, name)
            for name in written.spellings
            if (key := find_key(schema, name)) is not None and key.ignored
        },
        follows_verl=written.follows_verl,
    )


def _write(
    schema: type[BaseModel], assignments: Iterable[Assignment], *, spellings: Mapping[str, str]
) -> _Written:
    written = _Written(schema, spellings)
    for assignment in assignments:
        written.add(assignment)
    return written


def _assignments_of(files: Sequence[Loaded]) -> Iterator[Assignment]:
    for file in files:
        yield from file.assignments


def _given(values: Mapping[str, Any]) -> Iterator[Assignment]:
    """Yield the assignments of a program. Paths become text, and NumPy's values become Python's."""
    for name, value in values.items():
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError("keys", name, rule="is not a name", remedy="Name a key in quotes.")
        mode = Mode.ADD if name.startswith("+") else Mode.SET
        if isinstance(value, PurePath):
            plain: Any = str(value)
        else:
            plain = value.tolist() if hasattr(value, "tolist") else value
        yield Assignment(name.lstrip("+"), plain, mode, _KEYS)


class _Written:
    """The assignments that were added: a sparse tree of values, and the spelling of each key."""

    def __init__(self, schema: type[BaseModel], spellings: Mapping[str, str]) -> None:
        self._schema = schema
        self._spellings = spellings
        self._reads_megatron = bool(SPELLINGS.keys() & spellings.keys())
        self.tree: Tree = {}
        self.spellings: dict[str, str] = {}
        self._verl_defaults: dict[str, Any] = {}
        self._latest: dict[str, dict[str, Assignment]] = {}
        self.unknown: dict[str, None] = {}
        self.warnings: list[str] = []

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of verl that are in use: key -> value."""
        given = self._verl_defaults.items()
        return {name: value for name, value in given if name not in self.spellings}

    @property
    def follows_verl(self) -> bool:
        """Whether one of verl's configurations was named."""
        return bool(self._verl_defaults)

    @property
    def follows_megatron(self) -> bool:
        """Whether keys of Megatron lay out the weights."""
        return STRATEGY in self.spellings and _value_at(self.tree, STRATEGY) == "megatron"

    def add(self, assignment: Assignment) -> None:
        """Add one assignment. Raise UserError if its key is unknown."""
        if assignment.name.partition(".")[0] == "hydra":
            return
        if assignment.mode is Mode.DEFAULT:
            if find_key(self._schema, assignment.name) is None:
                return  # the configuration of another command
            self._verl_defaults[assignment.name] = assignment.value
            self._put_defaults(assignment.name)
            return
        name = canonical_name(self._schema, assignment.name, spellings=self._spellings)
        if name == "model_engine" and assignment.value == "megatron":
            name = STRATEGY
        is_mapping = isinstance(assignment.value, Mapping)
        is_value = name in keys_of(self._schema) and not is_mapping
        names_section = is_section(self._schema, name) or (
            # verl has a section where its earlier versions have a key.
            is_mapping and any(one.startswith(f"{assignment.name}.") for one in self._spellings)
        )
        if names_section and assignment.mode is not Mode.RESET and not is_value:
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
        (``${...}``), verl's defaults of two spellings and keys without effect are not compared.
        """
        for name, by_spelling in self._latest.items():
            if _is_without_effect(find_key(self._schema, name)):
                continue
            given = [one for one in by_spelling.values() if not _has_interpolation(one.value)]
            for other in given[1:]:
                if other.value != given[0].value and self._precedence(other) == _GIVEN:
                    raise contradiction(given[0], other, name=name)

    def require_followed(self) -> None:
        """Raise UserError if a model's own strategy asks for keys that nothing reads."""
        for spelling, name in SPELLINGS.items():
            strategy = f"{spelling.partition('.megatron.')[0]}.strategy"
            if not {spelling, strategy} <= self.spellings.keys():
                continue
            value = _value_at(self.tree, spelling)
            changes = value != MEGATRON_IGNORED[spelling][0]
            if changes and _value_at(self.tree, strategy) == "megatron":
                raise UserError(
                    spelling,
                    value,
                    rule=f"{strategy}=megatron does not read it; {STRATEGY}=megatron does, for all "
                    "models",
                    remedy=f"Set {name}={in_override_grammar(value)} or {STRATEGY}=megatron.",
                )

    def _add_section(self, name: str, assignment: Assignment) -> None:
        if assignment.value is None:
            return  # nothing is given in the section
        if chooses_built_option(name, assignment.value) or self._refers_to(name, assignment.value):
            return
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

    def _refers_to(self, name: str, value: Any) -> bool:
        """Return whether a value is an interpolation of ``name`` itself by another spelling.

        verl's configurations give a value that has two places in this way.
        """
        if not (isinstance(value, str) and value.startswith("${") and value.endswith("}")):
            return False
        other = value[2:-1]
        meant = canonical_name(self._schema, other, spellings=self._spellings)
        return other != name and meant == name

    def _add_unknown(self, assignment: Assignment) -> None:
        name = assignment.name
        nearest = nearest_key(self._schema, name)
        if assignment.mode is not Mode.ADD or is_closed(name):
            command = _command_with(self._schema, name)
            raise unknown_key(assignment, nearest, command=command, is_closed=is_closed(name))
        if name not in self.unknown:
            place = "" if assignment.source == _COMMAND_LINE else f" ({assignment.source})"
            self.warnings.append(f"{name}{place}: unknown, has no effect; nearest key: {nearest}")
        self.unknown[name] = None

    def _add_value(self, name: str, assignment: Assignment) -> None:
        key = find_key(self._schema, name)
        if self._yields(name, assignment) or self._refers_to(name, assignment.value):
            return
        if assignment.value is None and is_unset_by_null(name) and not (key and key.accepts_null):
            self._reset(name)
            return
        is_recorded = assignment.source not in (_COMMAND_LINE, _KEYS) and _is_default(key, "")
        if assignment.value == "" and not (_is_without_effect(key) or is_recorded):
            raise empty_value(self._schema, name)
        if key is not None and key.is_number and isinstance(assignment.value, bool):
            raise _as_written(not_a_number(key, assignment.value), {name: assignment.name})
        is_other = name != assignment.name and assignment.name not in SPELLINGS
        if is_other and name not in self.spellings:
            self.warnings.append(f"{assignment.name} is read as {name}")
        self._forget_below(name)
        self.spellings[name] = assignment.name
        self._keep(name, assignment)
        _put(self.tree, name, value=assignment.value)

    def _yields(self, name: str, assignment: Assignment) -> bool:
        """Return whether another spelling in the same source has a value of higher precedence."""
        mine = self._precedence(assignment)
        return any(
            other.source == assignment.source and self._precedence(other) > mine
            for spelling, other in self._latest.get(name, {}).items()
            if spelling != assignment.name
        )

    def _precedence(self, assignment: Assignment) -> int:
        """Return how much a value says beside that of another spelling.

        verl's configurations have both spellings of some keys with different defaults, of which
        each of its engines reads one. What a user writes on the command line is no default.
        """
        if assignment.value is None:
            return _NULL
        if assignment.source in (_COMMAND_LINE, _KEYS):
            return _GIVEN
        _, dot, part = assignment.name.rpartition(".lora.")
        is_megatrons = bool(dot)
        default = LORA_OF_MEGATRON.get(part) if dot else LORA.get(assignment.name.split(".")[-1])
        if default is None or assignment.value != default:
            return _GIVEN
        return _READ_DEFAULT if is_megatrons == self._reads_megatron else _OTHER_DEFAULT

    def _keep(self, name: str, assignment: Assignment) -> None:
        """Keep the latest value of each spelling of equal precedence, from the latest source."""
        by_spelling = self._latest.setdefault(name, {})
        mine = self._precedence(assignment)
        for spelling, other in list(by_spelling.items()):
            if other.source != assignment.source or self._precedence(other) < mine:
                del by_spelling[spelling]
        by_spelling[assignment.name] = assignment

    def _forget_below(self, name: str) -> None:
        """Forget the keys below a key, which its new value replaces."""
        for known in [known for known in self.spellings if known.startswith(f"{name}.")]:
            del self.spellings[known], self._latest[known]

    def _reset(self, name: str) -> None:
        self._forget_below(name)
        self.spellings.pop(name, None)
        self._latest.pop(name, None)
        *sections, last = name.split(".")
        node = self.tree
        for section in sections:
            below: object = node.get(section)
            node = cast(Tree, below) if isinstance(below, dict) else {}
        node.pop(last, None)
        self._put_defaults(name)

    def _put_defaults(self, name: str) -> None:
        """Put verl's defaults of a key, or of the keys of a section, where nothing is set."""
        for known, value in self.defaults.items():
            if known == name or known.startswith(f"{name}."):
                _put(self.tree, known, value=value)


def _is_without_effect(key: Key | None) -> bool:
    return key is not None and bool(key.ignored) and key.unbuilt is None


def _require_built(schema: type[BaseModel], tree: Tree, *, spellings: Mapping[str, str]) -> None:
    """Raise UserError for the first key that asks for a capability that is not built."""
    for name, spelling in spellings.items():
        key, value = find_key(schema, name), _value_at(tree, name)
        if key is None or key.unbuilt is None or value in key.unbuilt.harmless:
            continue
        same = key.unbuilt.same_as
        is_same = same and same in spellings and _value_at(tree, same) == value
        if not is_same and not _is_idle(schema, tree, key=key):
            raise not_built(key.unbuilt, spelling, value=value, is_below=name != key.name)


def _is_default(key: Key | None, value: Any) -> bool:
    """Return whether a key has a default, as the recorded configuration of a run has it."""
    return key is not None and key.default == value


def _is_idle(schema: type[BaseModel], tree: Tree, *, key: Key) -> bool:
    """Return whether another key of its section makes a key that is not built idle."""
    if key.unbuilt is None or not key.unbuilt.idle_with:
        return False
    other, idle = key.unbuilt.idle_with
    name = f"{key.name.rpartition('.')[0]}.{other}"
    known = find_key(schema, name)
    try:
        return _value_at(tree, name) == idle
    except (KeyError, TypeError):
        return known is not None and known.default == idle  # it is not set


def _read(schema: type[BaseModel], tree: Tree, *, prefix: str = "") -> Tree:
    """Return a copy of ``tree`` without ignored keys and without sections that are empty."""
    kept: Tree = {}
    for part, value in tree.items():
        name = f"{prefix}{part}"
        if is_section(schema, name) and isinstance(value, dict):
            if below := _read(schema, cast(Tree, value), prefix=f"{name}."):
                kept[part] = below
        elif (key := find_key(schema, name)) is None or not key.ignored:
            kept[part] = value
    return kept


def _command_with(schema: type[BaseModel], name: str) -> str:
    """Return the other command if ``name`` is a key of it, else ""."""
    other, command = (RunConfig, "train") if schema is SftConfig else (SftConfig, "sft")
    canonical = canonical_name(other, name)
    is_known = find_key(other, canonical) is not None or is_section(other, canonical)
    return command if is_known else ""


def _build(schema: type[ConfigT], tree: Tree, *, defaults: Iterable[str]) -> ConfigT:
    try:
        config = schema.model_validate(tree)
    except ValidationError as error:
        raise describe(schema, error, tree=tree) from error
    for name in defaults:
        section, _, key = name.rpartition(".")
        attrgetter(section)(config).model_fields_set.discard(key)
    return config


def _as_written(error: UserError, spellings: Mapping[str, str]) -> UserError:
    """Return an error with the spelling of Megatron where its key was written so."""
    if spellings.get(error.key) not in SPELLINGS:
        return error
    key, rule, remedy = map(in_words_of_megatron, (error.key, error.rule, error.remedy))
    return UserError(key, error.value, rule=rule, remedy=remedy)


def _put(tree: Tree, name: str, *, value: Any) -> None:
    """Set the dotted key ``name`` of a tree, and create missing sections above it."""
    *sections, last = name.split(".")
    node = tree
    for section in sections:
        if not isinstance(node.get(section), dict):
            node[section] = {}
        node = node[section]
    node[last] = value


def _value_at(tree: Tree, name: str) -> Any:
    """Return the value of the dotted key ``name`` in a tree that has it."""
    node: Any = tree
    for part in name.split("."):
        node = node[part]
    return node


def _resolve(schema: type[BaseModel], tree: Tree) -> Tree:
    """Return a copy of ``tree`` with resolved interpolations, which may refer to defaults.

    Raises:
        UserError: an interpolation refers to a key that does not exist.
    """
    if not _has_interpolation(tree):
        return tree
    OmegaConf.register_new_resolver("now", _now, replace=True)
    OmegaConf.register_new_resolver("env", oc.env, replace=True)
    defaults = schema().model_dump()
    for name, (default, _) in ignored_table(schema).items():
        if default != {}:
            _put(defaults, name, value=default)
    merged = _with_other_spellings(_merged(defaults, tree))
    try:
        full = OmegaConf.create(merged)
    except (OmegaConfBaseException, RecursionError) as error:
        name = str(getattr(error, "full_key", None) or "keys")
        raise UserError(name, rule=_unresolved(error), remedy="Correct its value.") from error
    return _resolved(tree, full)


def _with_other_spellings(tree: Tree) -> Tree:
    """Add the values under the other spellings of their keys, to which verl's files refer."""
    for spelling, name in ALIASES.items():
        if any(longer.startswith(f"{spelling}.") for longer in ALIASES):
            continue
        try:
            value = _value_at(tree, name)
        except (KeyError, TypeError):
            continue  # a key of the other command, or below a value that is not a section
        _put(tree, spelling, value=value)
    return tree


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _has_interpolation(value: Any) -> bool:
    """Return whether a value, or anything below it, contains ``${...}``."""
    if isinstance(value, Mapping):
        return any(_has_interpolation(entry) for entry in cast(Mapping[str, Any], value).values())
    if isinstance(value, list | tuple):
        return any(_has_interpolation(entry) for entry in cast(list[Any], value))
    return isinstance(value, str) and "${" in value


def _merged(defaults: Any, tree: Any) -> Any:
    if not isinstance(defaults, dict) or not isinstance(tree, dict):
        return tree
    ours, theirs = cast(Tree, defaults), cast(Tree, tree)
    return ours | {name: _merged(ours.get(name), value) for name, value in theirs.items()}


def _resolved(tree: Tree, full: Any, *, prefix: str = "") -> Tree:
    """Return ``tree`` with each interpolated leaf replaced by its resolved value in ``full``."""
    resolved: Tree = {}
    for part, value in tree.items():
        if isinstance(value, dict):
            below = cast(Tree, value)
            resolved[part] = _resolved(below, full[part], prefix=f"{prefix}{part}.")
        elif _has_interpolation(value):
            resolved[part] = _resolved_leaf(value, full, prefix=prefix, part=part)
        else:
            resolved[part] = value
    return resolved


def _resolved_leaf(value: Any, full: Any, *, prefix: str, part: str) -> Any:
    try:
        found = full[part]
        return OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
    except (OmegaConfBaseException, RecursionError) as error:
        name, remedy = f"{prefix}{part}", "Write the value itself."
        raise UserError(name, value, rule=_unresolved(error), remedy=remedy) from error


def _unresolved(error: Exception) -> str:
    return f"cannot be resolved ({short_cause(error)})"
