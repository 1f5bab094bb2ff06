# SPDX-License-Identifier: Apache-2.0
"""A GRPO run that generates with SGLang is the run of the native engine, and leaves no process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.commands import run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

SGLANG = "sglang"


def _train(material: Material, folder: Path, name: str) -> dict[int, dict[str, float]]:
    policy = write_tiny_policy(folder / f"policy {name}", size=replace(TINY, hidden=64))
    keys = (
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.rollout.name={name}",
        f"actor_rollout_ref.rollout.engine_kwargs.sglang.python={PYTHON}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
    )
    run = folder / f"run {name}"
    ended = run_command(train_arguments(material, run, *keys), folder=folder)
    assert ended.code == 0, ended.stderr
    return metrics_of(run)


def test_a_run_with_sglang_is_that_of_the_native_engine(material: Material, tmp_path: Path) -> None:
    expected, found = (_train(material, tmp_path, name) for name in ("native", SGLANG))
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    last = found[max(found)]
    assert last["training/rollout_probs_diff_max"] < 1e-4
