# SPDX-License-Identifier: Apache-2.0
"""Acceptance test 24: a tiny task with a known optimum is learned at any lag. The runs are
repeatable (``deterministic_async``), and every token is as old as the lag allows.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.fakes import learnable
from tests.fakes.commands import run_command
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

NUM_STEPS = 96
TARGET = 0.8
WINDOW = 8
pytestmark = pytest.mark.deep

CORRECTION = "algorithm.rollout_correction.rollout_is"
SETTINGS = (
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.hybrid_engine=False",
    "trainer.async_pipeline=True",
    "trainer.deterministic_async=True",
    "trainer.total_epochs=10",
    f"trainer.total_training_steps={NUM_STEPS}",
    "data.val_files=[]",
    "actor_rollout_ref.actor.optim.lr=0.003",
    f"custom_reward_function.path={learnable.__file__}",
    "custom_reward_function.name=sevens",
)


def learned(material: Material, folder: Path, *, lag: int, correction: str) -> int:
    """The updates until the mean reward of ``WINDOW`` steps is above the target."""
    keys = (f"trainer.generate_ahead_steps={lag}", f"{CORRECTION}={correction}")
    ended = run_command(train_arguments(material, folder / "run", *SETTINGS, *keys), folder=folder)
    assert ended.code == 0, ended.stderr
    rows = metrics_of(folder / "run")
    if lag > 0:
        assert rows[NUM_STEPS]["training/lag/mean"] == lag
        assert 0 < rows[NUM_STEPS]["rollout_corr/rollout_is_eff_sample_size"] <= 1
    scores = [rows[step]["critic/score/mean"] for step in range(1, NUM_STEPS + 1)]
    means = [statistics.fmean(scores[i : i + WINDOW]) for i in range(NUM_STEPS - WINDOW + 1)]
    return WINDOW + next(i for i, mean in enumerate(means) if mean > TARGET)


@pytest.fixture(scope="module")
def on_policy(material: Material, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Updates without a lag."""
    return learned(material, tmp_path_factory.mktemp("on_policy"), lag=0, correction="auto")


@pytest.mark.parametrize("lag", [1, 4])
def test_24_with_correction_a_lag_costs_at_most_a_fifth_more_updates(
    material: Material, tmp_path: Path, on_policy: int, lag: int
) -> None:
    assert learned(material, tmp_path, lag=lag, correction="auto") <= 1.2 * on_policy


def test_24_without_correction_the_target_is_reached_too(
    material: Material, tmp_path: Path, on_policy: int
) -> None:
    assert learned(material, tmp_path, lag=4, correction="null") >= on_policy
