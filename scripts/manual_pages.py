# SPDX-License-Identifier: Apache-2.0
"""The pages of the manual that are made from the program: the keys and the commands.

mkdocs calls ``on_files`` while it builds the manual (mkdocs.yml).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel

from tandem.cli.main import COMMANDS
from tandem.config.parse.keys import Condition, Key, in_override_grammar, keys_of
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

SCHEMAS = {"tandem train": RunConfig, "tandem sft": SftConfig}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "keys.md": keys_page("tandem train", RunConfig),
        "keys_sft.md": keys_page("tandem sft", SftConfig),
        "keys_without_effect.md": ignored_page(),
        "keys_not_built.md": unbuilt_page(),
        "commands.md": commands_page(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def keys_page(command: str, schema: type[BaseModel]) -> str:
    """Return a page with the keys of a command, in a table for each section."""
    keys = [key for key in keys_of(schema).values() if not key.ignored]
    lines = [
        f"# Keys of {command}",
        "",
        f"These are all {len(keys)} keys of `{command}` that have an effect. `tandem keys WORD` "
        "finds keys by a word, and `tandem plan` shows the values that a run would use. Keys of "
        "verl that have no effect are on [a page of their own](keys_without_effect.md), and so "
        "are keys of [capabilities that are not built](keys_not_built.md).",
    ]
    keys.sort(key=_place_of_section(keys))
    for section, members in groupby(keys, key=_section):
        lines += ["", f"## {section or 'Keys without a section'}", ""]
        lines += _table(("key", "default", "meaning"), map(_row, members))
    return "\n".join(lines) + "\n"


def ignored_page() -> str:
    """Return a page with the keys that are accepted without effect, and the reasons."""
    lines = [
        "# Keys without effect",
        "",
        "Scripts of verl set these keys. tandem accepts them, and `tandem plan` and the run list "
        "each one that is set with its reason. None of them changes what is trained.",
    ]
    for command, schema in SCHEMAS.items():
        keys = [key for key in keys_of(schema).values() if key.ignored and not key.unbuilt]
        lines += ["", f"## {command}", "", *_table(("key", "reason"), map(_ignored_row, keys))]
    return "\n".join(lines) + "\n"


def unbuilt_page() -> str:
    """Return a page with the keys of capabilities that are not built."""
    lines = [
        "# Capabilities that are not built",
        "",
        "Each of these keys chooses a capability of verl that tandem lacks. A value that leaves "
        "training as it is has no effect. With any other value, `tandem plan` and the run end "
        "with an error that names the capability.",
    ]
    for command, schema in SCHEMAS.items():
        keys = [key for key in keys_of(schema).values() if key.unbuilt]
        header = ("key", "values without effect", "capability")
        lines += ["", f"## {command}", "", *_table(header, map(_unbuilt_row, keys))]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Return a page with the commands of the table in ``tandem.cli.main``."""
    rows = ([f"`tandem {name}`", command.summary] for name, command in COMMANDS.items())
    lines = ["# Commands", "", *_table(("command", "effect"), rows)]
    lines += ["", "Each command explains its arguments with `--help`."]
    return "\n".join(lines) + "\n"


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _place_of_section(keys: Sequence[Key]) -> Callable[[Key], int]:
    """Return a sort key that puts the keys of a section together, where its first one stands."""
    places = {name: place for place, name in enumerate(dict.fromkeys(map(_section, keys)))}
    return lambda key: places[_section(key)]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _line(header)
    yield "|" + "---|" * len(header)
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _row(key: Key) -> Sequence[str]:
    kind = f"one of {', '.join(f'`{name}`' for name in key.choices)}" if key.choices else key.kind
    facts = [f"({kind})"]
    if key.read_if:
        facts.append(f"Read only with {' and '.join(map(_condition, key.read_if))}.")
    name = key.name.rpartition(".")[2]
    return (
        f"`{name}`",
        f"`{in_override_grammar(key.default)}`",
        " ".join([key.description, *facts]),
    )


def _condition(condition: Condition) -> str:
    return f"`{condition.name}{condition.operator}{'|'.join(condition.values)}`"


def _ignored_row(key: Key) -> Sequence[str]:
    return f"`{key.name}{'.*' if key.is_open else ''}`", key.ignored


def _unbuilt_row(key: Key) -> Sequence[str]:
    assert key.unbuilt is not None, key.name
    harmless = ", ".join(f"`{in_override_grammar(value)}`" for value in key.unbuilt.harmless)
    capability = " ".join(filter(None, (key.unbuilt.capability + ".", key.unbuilt.remedy)))
    return f"`{key.name}`", harmless, capability
