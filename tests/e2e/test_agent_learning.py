# SPDX-License-Identifier: Apache-2.0
"""Reward alone teaches a model of the quickstart to call a tool for each step (M29).

This is a short form of ``tandem quickstart --task calculator``: all demonstrations begin with a
call, so that the model learns sooner to copy digits into one, and most of them stop there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart import materials as module
from tandem.quickstart.calculator import CALCULATOR, calls_twice, stops_early
from tandem.quickstart.command import warm_start
from tests.fakes.calculator_run import GRPO
from tests.fakes.tiny_run import metrics_of

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
CALLS = "val-aux/agent/calls/mean"
NUM_STEPS = 30


def trained(folder: Path, *keys: str, tool: Sequence[str]) -> dict[str, float]:
    """Run GRPO with the keys of the quickstart; return what its validation measured."""
    assert CALCULATOR.tools is not None
    arguments = (
        GRPO,
        *CALCULATOR.tools.grpo_keys,
        *tool,
        f"trainer.default_local_dir={folder}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *keys,
    )
    config = load_config(RunConfig, list(arguments)).config
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
    return dict(ended.result.validation)


def test_m29_reward_teaches_the_calls_without_which_no_problem_is_solved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CALCULATOR.tools is not None
    tools = CALCULATOR.tools
    for name, count in (("NUM_DEMONSTRATIONS", 6400), ("NUM_TRAIN", 2000), ("NUM_TEST", 64)):
        monkeypatch.setattr(module, name, count)
    writers = ((calls_twice, 0.4), (stops_early, 0.6))
    materials = module.prepare(tmp_path, seed=0, task=replace(CALCULATOR, writers=writers))
    sizes = ("data.train_batch_size=16", "trainer.total_training_steps=400", "trainer.device=cpu")
    warm = warm_start(materials, tmp_path / "sft", seed=0, keys=(*tools.sft_keys, *sizes))
    files = (f"data.train_files={materials.train}", f"data.val_files={materials.test}")
    run = tmp_path / "run"
    after = trained(
        run,
        *files,
        f"actor_rollout_ref.model.path={warm}",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.test_freq={NUM_STEPS}",
        tool=tools.tool_keys,
    )
    before = metrics_of(run)[0]
    assert before[ACCURACY] < 0.6 and before[CALLS] < 1.5
    assert after[ACCURACY] >= 0.8 and after[CALLS] >= 1.8
    without = trained(
        tmp_path / "broken",
        *files,
        f"actor_rollout_ref.model.path={run / f'global_step_{NUM_STEPS}' / 'actor'}",
        "trainer.val_only=True",
        tool=tools.broken_keys,
    )
    assert without[ACCURACY] <= 0.05
