# SPDX-License-Identifier: Apache-2.0
"""The names of verl's entry modules on a command line."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tandem.cli.entries import ENTRIES, spelled_out
from tandem.cli.main import main
from tandem.config.schema.verl_defaults import VERL_DEFAULTS

SFT = "verl.trainer.fsdp_sft_trainer"


def test_every_entry_is_a_module_and_has_defaults() -> None:
    for name, entry in ENTRIES.items():
        assert find_spec(f"tandem.trainer.{name}") is not None
        assert entry.config_name in VERL_DEFAULTS


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        (["main_ppo", "a=b"], ["train", "--config-name=ppo_trainer", "a=b"]),
        (
            ["plan", "--json", "main_ppo", "a=b"],
            ["plan", "--json", "--config-name=ppo_trainer", "a=b"],
        ),
        (["plan", "sft_trainer"], ["plan", "sft", "--config-name=sft_trainer_engine"]),
        (["train", "main_ppo"], ["train", "main_ppo"]),
        (
            ["plan", "--json", "python3", "-m", "verl.trainer.main_ppo", "a=b"],
            ["plan", "--json", "--config-name=ppo_trainer", "a=b"],
        ),
        (
            [*["plan", "torchrun", "--standalone", "--nproc-per-node", "8"], "-m", SFT, "a=b"],
            ["plan", "sft", "--config-name=sft_trainer", "trainer.n_gpus_per_node=8", "a=b"],
        ),
        (
            ["plan", "python", "-m", "verl.experimental.one_step_off_policy.main_ppo", "a=b"],
            ["plan", "--config-name=one_step_off_ppo_trainer", "a=b"],
        ),
        (
            ["plan", "python3", "-m", "recipe.fully_async_policy.fully_async_main", "a=b"],
            ["plan", "--config-name=fully_async_ppo_trainer", "a=b"],
        ),
        (["plan", "python3", "-m", "other.module"], ["plan", "python3", "-m", "other.module"]),
        (["plan", "python3", "-m"], ["plan", "python3", "-m"]),
        ([], []),
    ],
)
def test_a_name_means_a_command_with_verls_defaults(words: list[str], meaning: list[str]) -> None:
    assert spelled_out(words) == meaning


def test_the_help_of_an_entry_module_has_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft_trainer", "--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "optim.lr=0.001" in shown
    assert main(["sft", "--help"]) == 0
    assert "optim.lr=1e-05" in capsys.readouterr().out.splitlines()
