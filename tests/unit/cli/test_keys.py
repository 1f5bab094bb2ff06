# SPDX-License-Identifier: Apache-2.0
"""``tandem keys`` finds keys by words, and what it prints can be typed."""

from __future__ import annotations

import pytest

from tandem.cli.main import main
from tandem.config.parse.grammar import parse_override
from tandem.config.parse.keys import in_override_grammar, keys_of
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig


def test_words_choose_keys_by_name_then_by_description(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["keys", "loss_agg"]) == 0
    printed = capsys.readouterr().out
    names = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert names[0] == "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    assert all("loss_agg" in name for name in names)
    assert "one of token-mean, " in " ".join(printed.split())
    assert main(["keys", "sft", "learning", "peak"]) == 0
    assert "optim.lr=" in capsys.readouterr().out
    assert main(["keys", "sft", "muon_lr"]) == 0
    assert "read only with optim.optimizer=Muon" in " ".join(capsys.readouterr().out.split())
    assert main(["keys", "no-such-word"]) == 2
    assert "no key has these words" in capsys.readouterr().err


def test_help_has_types_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in ("(one of error, left, right, middle", "(an integer", "(True or False", "(a list"):
        assert text in printed


@pytest.mark.parametrize("schema", [RunConfig, SftConfig])
def test_every_default_that_is_printed_can_be_typed(
    schema: type[RunConfig] | type[SftConfig],
) -> None:
    for key in keys_of(schema).values():
        shown = in_override_grammar(key.default)
        if shown and not key.ignored:
            assert in_override_grammar(parse_override(f"{key.name}={shown}").value) == shown


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tandem ")
