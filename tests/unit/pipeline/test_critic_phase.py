# SPDX-License-Identifier: Apache-2.0
"""The critic's part of a step: which sequences it learns from, and what it is told of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.api import Engines, Scores
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.pipeline.batch import lay_out
from tandem.pipeline.experience import Experience, assign_credit
from tandem.pipeline.loop import initial_kl_controller
from tandem.pipeline.microbatches import MemoryFit
from tandem.pipeline.phases import score_with_critic, update_critic
from tandem.pipeline.step_metrics import value_metrics
from tandem.types import (
    LossScale,
    PackedBatch,
    UpdateReport,
)
from tests.fakes.pipeline import ImmediateRuntime, partial_context, scored_group

KEYS = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.temperature=0.5",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)


class RecordingCritic:
    """A critic whose value of a token is a hundredth of its id; keeps what it was told."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self) -> None:
        self.updates: list[tuple[list[PackedBatch], LossScale]] = []
        self.temperatures: list[float] = []
        self.num_advances = 0

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Values."""
        self.temperatures.append(temperature)
        return [Scores(batch.target_R / 100) for batch in batches]

    def update(
        self, batches: list[PackedBatch], loss: Any, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """One optimizer step."""
        self.updates.append((batches, scale))
        self.temperatures.append(temperature)
        return UpdateReport({}, grad_norm=1.0, learning_rate=0.1, skipped=False)

    def advance_schedule(self) -> None:
        """One training step is over."""
        self.num_advances += 1


GROUPS = [scored_group(1, 1.0, 0.0), scored_group(2, None, 1.0)]


def learn(*arguments: str, old_logp_R: Tensor | None = None) -> tuple[RecordingCritic, Experience]:
    """Values, advantages and the critic's optimizer steps on ``GROUPS``."""
    critic = RecordingCritic()
    given: dict[str, Any] = {
        "config": load_config(RunConfig, [*KEYS, *arguments]).config,
        "runtime": ImmediateRuntime(),
        "engines": Engines(critic, critic, None, critic, critic=critic),  # type: ignore[arg-type]
        "memory": MemoryFit(),
    }
    parts = partial_context(**given)
    batch = lay_out(GROUPS)
    values_R = asyncio.run(score_with_critic(parts, batch))
    experience = assign_credit(
        replace(batch, old_logp_R=old_logp_R, values_R=values_R),
        config=parts.config,
        controller=initial_kl_controller(parts.config),
    )
    asyncio.run(update_critic(parts, experience))
    return critic, experience


def test_the_critic_learns_the_returns_of_all_sequences_that_have_a_reward() -> None:
    critic, _ = learn()
    ((batches, scale),) = critic.updates
    assert scale == LossScale(num_tokens=9, num_sequences=3)
    found = {}
    for batch in batches:
        columns = batch.columns
        assert columns is not None and columns.returns_R is not None
        assert columns.values_R is not None and columns.old_logp_R is None
        torch.testing.assert_close(columns.values_R, batch.target_R / 100)
        for token, value in zip(batch.target_R.tolist(), columns.returns_R.tolist(), strict=True):
            found.setdefault(token, []).append(value)
    assert found == {20: [1.0] * 3, 21: [pytest.approx(0, abs=1e-6)] * 3, 41: [1.0] * 3}
    assert critic.temperatures == [1.0, 1.0] and critic.num_advances == 1


def test_the_critics_own_keys_cut_its_mini_batches() -> None:
    critic, _ = learn("critic.ppo_mini_batch_size=1", "critic.ppo_epochs=2")
    assert [scale.num_sequences for _, scale in critic.updates] == [2, 1, 2, 1]
    assert critic.num_advances == 1


def test_rejected_tokens_are_not_learned_from() -> None:
    rejects = (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
    )
    old_R = torch.full((12,), -0.5)
    old_R[0] = -9.0
    critic, _ = learn(*rejects, old_logp_R=old_R)
    ((batches, scale),) = critic.updates
    assert scale == LossScale(num_tokens=9, num_sequences=3), "denominators count them"
    assert sum(len(batch.target_R) for batch in batches) == 8


def test_the_values_explain_the_share_of_the_variance_that_they_take_away() -> None:
    _, experience = learn()
    counted_R = torch.tensor([True] * 6 + [False] * 3 + [True] * 3)
    assert experience.batch.values_R is not None
    values_R, returns_R = experience.batch.values_R[counted_R], experience.returns_R[counted_R]
    residual = float((returns_R - values_R).var() / (returns_R.var() + 1e-5))
    found = value_metrics(experience)
    assert found["critic/vf_explained_var"] == pytest.approx(1 - residual, abs=1e-6)
    assert found["critic/values/max"] == pytest.approx(0.41)
    assert found["critic/values/min"] == pytest.approx(0.20)
    assert found["critic/values/mean"] == pytest.approx((0.2 + 0.21 + 0.41) / 3)
