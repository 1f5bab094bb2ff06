# SPDX-License-Identifier: Apache-2.0
"""The override grammar: every form of verl's published commands, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config.parse.grammar import Mode, parse_arguments, parse_override
from tandem.errors import UserError


@pytest.mark.parametrize(
    ("argument", "name", "value", "mode"),
    [
        ("a.b.c=v", "a.b.c", "v", Mode.SET),
        ("+a.b.c=v", "a.b.c", "v", Mode.ADD),
        ("++a.b.c=v", "a.b.c", "v", Mode.ADD),
        ("~a.b", "a.b", None, Mode.RESET),
        ("~a.b=3", "a.b", None, Mode.RESET),
        ("a=5e-7", "a", 5e-7, Mode.SET),
        ("a=128", "a", 128, Mode.SET),
        ("a=True", "a", True, Mode.SET),
        ("a=null", "a", None, Mode.SET),
        ("a=", "a", "", Mode.SET),
        ("a='it is'", "a", "it is", Mode.SET),
        ('a="5"', "a", "5", Mode.SET),
        ("a=[console,tensorboard]", "a", ["console", "tensorboard"], Mode.SET),
        (
            "+a=[[logp,actor-train],ref_logp,generate]",
            "a",
            [["logp", "actor-train"], "ref_logp", "generate"],
            Mode.ADD,
        ),
        ("a={b:1,c:[x]}", "a", {"b": 1, "c": ["x"]}, Mode.SET),
        ("a=~/data/x.parquet", "a", "~/data/x.parquet", Mode.SET),
        ("a=/runs/lr=1/x", "a", "/runs/lr=1/x", Mode.SET),
        ("+a=x#y", "a", "x#y", Mode.ADD),
        ("a=hdfs://host/x", "a", "hdfs://host/x", Mode.SET),
        ("++hydra.run.dir=outputs//-", "hydra.run.dir", "outputs//-", Mode.ADD),
    ],
)
def test_every_form_is_parsed(argument: str, name: str, value: Any, mode: Mode) -> None:
    parsed = parse_override(argument)
    assert (parsed.name, parsed.value, parsed.mode) == (name, value, mode)
    assert type(parsed.value) is type(value)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "a=1,2",
            "a='1,2': it has several values, which only tandem sweep takes. Write a list, "
            "'a=[1,2]'",
        ),
        ("a=[1,2", "'a=[1,2': not a valid override"),
        ("data.train_batch_size", "must be key=value or a recipe file (.yaml)"),
        (
            "--verbose",
            "'--verbose': no such option. Keys are written as KEY=VALUE; tandem keys lists them.",
        ),
    ],
)
def test_what_is_no_override_is_refused_in_one_line(argument: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_override(argument)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        ["--config-path=dir", "--config-name=name"],
        ["--config-path", "dir", "--config-name", "name"],
        ["-cp", "dir", "-cn", "name"],
    ],
)
def test_hydras_options_are_read_in_both_forms(options: list[str]) -> None:
    line = parse_arguments([*options, "recipe.yaml", "a=1", ""])
    assert (line.config_path, line.config_names, line.recipes) == (
        "dir",
        ("name",),
        ("recipe.yaml",),
    )
    assert [override.name for override in line.overrides] == ["a"]


def test_an_option_without_its_value_is_refused() -> None:
    with pytest.raises(UserError, match="--config-name: a value must follow"):
        parse_arguments(["--config-name"])


def test_a_config_path_needs_a_name() -> None:
    with pytest.raises(UserError, match="--config-path=dir: names a folder only"):
        parse_arguments(["--config-path=dir"])


def test_a_home_folder_in_a_list_needs_no_quotes() -> None:
    parsed = parse_override("data.train_files=[~/a.parquet,/b c/d.parquet,~/e.parquet]")
    assert parsed.value == ["~/a.parquet", "/b c/d.parquet", "~/e.parquet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.b", "=", "5"], "'a.b': there are spaces around =. Write a.b=5."),
        (["a.b", "=5"], "'a.b': there are spaces around =. Write a.b=5."),
        (["a.b=\u201cx y\u201d"], "has the typographic sign \u201c. Write straight quotes"),
        (["\u2013\u2013learning_rate=1e-6"], "has the typographic sign \u2013"),
        (["a.b=caf\udce9"], "'a.b=caf\\udce9': has bytes that are no text in UTF-8. Rename"),
        (["--learning_rate", "1e-6"], "Keys are written as KEY=VALUE: actor_rollout_ref.actor.opt"),
        (["--num-generations=8"], "KEY=VALUE: actor_rollout_ref.rollout.n=VALUE."),
    ],
)
def test_habits_of_other_tools_are_answered(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_arguments(words)
    assert message in str(caught.value)
