# SPDX-License-Identifier: Apache-2.0
"""Reward alone teaches a model of the quickstart to call a tool for each step (M29).

These are short forms of ``tandem quickstart --task calculator``: all demonstrations begin with a
call, so that the model learns sooner to copy digits into one, and most of them stop there. Without
a tool, from demonstrations of mental arithmetic, the same model learns nothing. With slow tools and
steps that are generated ahead it learns what it learns without (M31). Jailed Python is a deep test
of the whole ``tandem quickstart --task python``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart import materials as module
from tandem.quickstart.calculator import (
    CALCULATOR,
    CALCULATOR_FILE,
    TURNS,
    calculates_mentally,
    calls_twice,
    stops_early,
)
from tandem.quickstart.command import warm_start
from tandem.quickstart.materials import Materials
from tandem.quickstart.task import Task
from tests.fakes.calculator_run import GRPO
from tests.fakes.commands import TIMEOUT_S, run_command
from tests.fakes.tiny_run import metrics_of

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
CALLS = "val-aux/agent/calls/mean"
ASYNCHRONOUS = (
    "trainer.async_pipeline=True",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
    "trainer.generate_ahead_steps=2",
)
WITH_TOOL = ((calls_twice, 0.4), (stops_early, 0.6))
WITHOUT = ((calculates_mentally, 1.0),)


def write_materials(folder: Path, task: Task[Any]) -> Materials:
    """Write less data than the quickstart does."""
    with pytest.MonkeyPatch.context() as patch:
        for name, count in (("NUM_DEMONSTRATIONS", 6400), ("NUM_TRAIN", 2000), ("NUM_TEST", 64)):
            patch.setattr(module, name, count)
        return module.prepare(folder, seed=0, task=task)


def fine_tuned(materials: Materials, folder: Path, *keys: str) -> Path:
    sizes = ("data.train_batch_size=16", "trainer.total_training_steps=400", "trainer.device=cpu")
    return warm_start(materials, folder, seed=0, keys=(*keys, *sizes))


def keys_of(materials: Materials, *, num_steps: int) -> tuple[str, ...]:
    return (
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        f"trainer.total_training_steps={num_steps}",
        f"trainer.test_freq={num_steps}",
    )


def trained(folder: Path, model: Path, *keys: str) -> dict[str, float]:
    """Run GRPO; return what its last validation measured."""
    arguments = (
        GRPO,
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *keys,
    )
    config = load_config(RunConfig, list(arguments)).config
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
    return dict(ended.result.validation)


def test_m29_reward_teaches_the_calls_without_which_no_problem_is_solved(tmp_path: Path) -> None:
    tools = CALCULATOR.tools
    assert tools is not None
    materials = write_materials(tmp_path, replace(CALCULATOR, writers=WITH_TOOL))
    warm = fine_tuned(materials, tmp_path / "sft", *tools.sft_keys)
    keys = (*tools.grpo_keys, *keys_of(materials, num_steps=30))
    run = tmp_path / "run"
    after = trained(run, warm, *keys, *tools.tool_keys)
    before = metrics_of(run)[0]
    assert before[ACCURACY] < 0.6 and before[CALLS] < 1.5
    assert after[ACCURACY] >= 0.8 and after[CALLS] >= 1.8
    learned = run / "global_step_30" / "actor"
    broken = (*keys, *tools.broken_keys, "trainer.val_only=True")
    assert trained(tmp_path / "broken", learned, *broken)[ACCURACY] <= 0.05


@pytest.mark.deep
def test_m29_reward_teaches_programs_to_be_executed(tmp_path: Path) -> None:
    words = ("quickstart", "--task", "python", "--folder", "made")
    ended = run_command(words, folder=tmp_path, timeout_s=3 * TIMEOUT_S)
    assert ended.code == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["accuracy_before"] < 0.6 and summary["accuracy_after"] >= 0.9
    assert summary["unseen_numbers_without_tool"] <= 0.05


@pytest.mark.deep
def test_m29_without_access_to_a_tool_the_same_model_learns_nothing(tmp_path: Path) -> None:
    tools = CALCULATOR.tools
    assert tools is not None
    materials = write_materials(tmp_path, replace(CALCULATOR, writers=WITHOUT))
    warm = fine_tuned(materials, tmp_path / "sft", *tools.sft_keys)
    for path in (materials.train, materials.test):  # whose rows ask for an agent with tools
        parquet.write_table(parquet.read_table(path).drop_columns("agent_name"), path)
    sizes = [key for key in tools.grpo_keys if not key.startswith(TURNS)]
    keys = (*sizes, *keys_of(materials, num_steps=20))
    after = trained(tmp_path / "run", warm, *keys)
    assert CALLS not in after
    assert metrics_of(tmp_path / "run")[0][ACCURACY] <= 0.1 and after[ACCURACY] <= 0.1


@pytest.mark.deep
def test_m31_steps_that_are_generated_ahead_with_slow_tools_teach_as_much(tmp_path: Path) -> None:
    """Both solve more than two in three of 64 problems, and differ by at most one in five.

    The two runs draw other samples. A difference of two shares of 0.8 has a standard deviation of
    0.07 with 64 problems each.
    """
    tools = CALCULATOR.tools
    assert tools is not None
    materials = write_materials(tmp_path, replace(CALCULATOR, writers=WITH_TOOL))
    warm = fine_tuned(materials, tmp_path / "sft", *tools.sft_keys)
    source = CALCULATOR_FILE.read_text()
    wait = "    import random, time\n\n    time.sleep(random.uniform(0, 0.3))\n"
    assert source.count("    match =") == 1
    slow = tmp_path / "slow_tool.py"
    slow.write_text(source.replace("    match =", f"{wait}    match ="))
    keys = (
        *tools.grpo_keys,
        *keys_of(materials, num_steps=40),
        f"{TURNS}.function_tool_path={slow}",
        "actor_rollout_ref.rollout.agent.num_workers=4",
    )
    waiting = trained(tmp_path / "waiting", warm, *keys)
    ahead = trained(tmp_path / "ahead", warm, *keys, *ASYNCHRONOUS)
    assert min(waiting[ACCURACY], ahead[ACCURACY]) > 2 / 3
    assert abs(waiting[ACCURACY] - ahead[ACCURACY]) <= 0.2
    rows = metrics_of(tmp_path / "ahead").values()
    lags = [row["training/lag/max"] for row in rows if "training/lag/max" in row]
    assert 0 < max(lags) <= 2
