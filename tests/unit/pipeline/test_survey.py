# SPDX-License-Identifier: Apache-2.0
"""The pass over a mini-batch that finds what its loss needs of all tokens at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.api import Engines, Scores
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.pipeline.batch import Batch, lay_out
from tandem.pipeline.experience import assign_credit
from tandem.pipeline.loop import initial_kl_controller
from tandem.pipeline.microbatches import MemoryFit
from tandem.pipeline.phases import update_policy
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    LossScale,
    PackedBatch,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
    UpdateReport,
)
from tests.fakes.pipeline import ImmediateRuntime, partial_context

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
KL_COV = (f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.kl_cov_ratio=0.34")
NORMALIZED = (
    f"{CORRECTION}.bypass_mode=True",
    f"{CORRECTION}.loss_type=reinforce",
    f"{CORRECTION}.rollout_is=token",
    f"{CORRECTION}.rollout_is_threshold=1000",
    f"{CORRECTION}.rollout_is_batch_normalize=True",
)


class Engine:
    """A policy whose log-prob of a token is minus its id in tenths, less one after each step."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self) -> None:
        self.num_scored: list[int] = []
        self.steps: list[dict[int, tuple[float, ...]]] = []

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Log-probs."""
        self.num_scored.append(sum(len(batch.target_R) for batch in batches))
        return [Scores(-batch.target_R / 10 - len(self.steps)) for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss: Any, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """Keep the surveyed columns by token."""
        found: dict[int, tuple[float, ...]] = {}
        for batch in batches:
            assert batch.columns is not None
            surveyed = (batch.columns.marked_R, batch.columns.weights_R)
            parts = [column.tolist() for column in surveyed if column is not None]
            if parts:
                found |= dict(zip(batch.target_R.tolist(), zip(*parts, strict=True), strict=True))
        self.steps.append(found)
        return UpdateReport({}, grad_norm=1.0, learning_rate=0.1, skipped=False)

    def advance_schedule(self) -> None:
        """One training step is over."""


def batch_of(*, old: bool) -> Batch:
    """Two groups of two responses of three tokens; all tokens differ, 1 to 12."""
    groups = []
    for uid in range(2):
        drawn = [tuple(range(6 * uid + 3 * k + 1, 6 * uid + 3 * k + 4)) for k in range(2)]
        samples = tuple(
            Sample(
                Trajectory.of_single_turn(
                    (40,), Completion(k, ids, (-0.5,) * 3, FinishReason.STOP, 0)
                ),
                "",
                RewardOutcome(RewardStatus.VALUE, 1.0 - k),
            )
            for k, ids in enumerate(drawn)
        )
        groups.append(Group(Prompt(uid, uid, (40,), "", "", ""), samples))
    old_logp_R = -torch.arange(1, 13) / 10 if old else None
    return replace(lay_out(groups), old_logp_R=old_logp_R)


def trained(*arguments: str, old: bool = False, policy_lag: int = 0) -> Engine:
    """Train on the batch, one group to a mini-batch unless the arguments say otherwise."""
    keys = ["data.train_batch_size=2", "actor_rollout_ref.rollout.n=2", *arguments]
    engine, config = Engine(), load_config(RunConfig, keys).config
    given: dict[str, Any] = {
        "config": config,
        "runtime": ImmediateRuntime(),
        "engines": Engines(engine, engine, None, engine),  # type: ignore[arg-type]
        "memory": MemoryFit(),
    }
    context = partial_context(**given)
    batch = replace(batch_of(old=old), policy_lag=policy_lag)
    experience = assign_credit(batch, config=config, controller=initial_kl_controller(config))
    asyncio.run(update_policy(context, experience))
    return engine


TWO_STEPS = f"{ACTOR}.ppo_mini_batch_size=1"
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=2"
SMALL = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"


@pytest.mark.parametrize("keys", [KL_COV, NORMALIZED])
def test_micro_batches_change_nothing(keys: tuple[str, ...]) -> None:
    whole, cut = trained(ONE_STEP, *keys), trained(ONE_STEP, SMALL, *keys)
    assert whole.steps == cut.steps and len(whole.steps[0]) == 12


def test_kl_cov_marks_a_share_of_each_mini_batch_under_the_current_policy() -> None:
    """Two of six tokens: the likeliest of the better response, the least likely of the other."""
    engine = trained(TWO_STEPS, *KL_COV)
    marked = [[token for token, (mark,) in step.items() if mark] for step in engine.steps]
    assert marked == [[1, 6], [7, 12]]
    assert engine.num_scored == [6, 6]


@pytest.mark.parametrize(("policy_lag", "num_scored"), [(0, [6]), (1, [6, 6])])
def test_old_log_probs_of_the_same_weights_save_the_first_pass(
    policy_lag: int, num_scored: list[int]
) -> None:
    engine = trained(TWO_STEPS, *KL_COV, old=True, policy_lag=policy_lag)
    assert engine.num_scored == num_scored
    assert engine.steps == trained(TWO_STEPS, *KL_COV).steps


def test_bypass_mode_divides_weights_by_their_mean_over_the_mini_batch() -> None:
    engine = trained(TWO_STEPS, *NORMALIZED)
    for number, step in enumerate(engine.steps):
        raw = {token: math.exp(-token / 10 - number + 0.5) for token in step}
        mean = sum(raw.values()) / len(raw)
        assert {t: w for t, (w,) in step.items()} == pytest.approx(
            {token: weight / mean for token, weight in raw.items()}, rel=1e-5
        )
    assert engine.num_scored == [6, 6], "the log-probs of the rollout are not those of the policy"


def test_other_losses_survey_nothing() -> None:
    assert trained(TWO_STEPS).num_scored == []
