# SPDX-License-Identifier: Apache-2.0
"""Every metric that a run logs is in the table of metrics, with its unit and meaning."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.metrics.names import find_metric
from tests.fakes.commands import run_command
from tests.fakes.tiny_run import Material, metrics_of, sft_arguments, train_arguments

ACTOR = "actor_rollout_ref.actor"
VALIDATION = "actor_rollout_ref.rollout.val_kwargs"
CORRECTION = "algorithm.rollout_correction"
TWO_STEPS = "trainer.total_training_steps=2"
RUNS = {
    "validation and KL in the loss": (
        "algorithm.adv_estimator=grpo",
        "trainer.test_freq=1",
        f"{VALIDATION}.n=2",
        f"{VALIDATION}.do_sample=True",
        f"{VALIDATION}.temperature=1.0",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.entropy_coeff=0.01",
    ),
    "critic and KL in the reward": (
        "data.val_files=[]",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
    ),
    "asynchronous, with correction": (
        "algorithm.adv_estimator=grpo",
        "data.val_files=[]",
        "trainer.generate_ahead_steps=1",
        f"{CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is_threshold=2.0",
        f"{CORRECTION}.rollout_rs=token_k1",
        f"{CORRECTION}.rollout_rs_threshold=0.5_2.0",
    ),
}


def unlisted(run: Path) -> set[str]:
    """Return the logged names that belong to no row of the table."""
    names = {name for row in metrics_of(run).values() for name in row}
    assert len(names) > 5
    return {name for name in names if find_metric(name) is None}


@pytest.mark.parametrize("kind", RUNS)
def test_metrics_of_reinforcement_learning(material: Material, tmp_path: Path, kind: str) -> None:
    keys = (*RUNS[kind], TWO_STEPS, f"critic.model.path={material.policy}")
    ended = run_command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert unlisted(tmp_path / "run") == set()


def test_metrics_of_supervised_training(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", TWO_STEPS, "trainer.test_freq=1")
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert unlisted(tmp_path / "run") == set()
