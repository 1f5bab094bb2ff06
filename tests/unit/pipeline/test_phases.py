# SPDX-License-Identifier: Apache-2.0
"""What an optimizer step is given: which sequences are computed, and by what sums are divided."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.api import Engines, Scores
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.data.packing import pack
from tandem.data.routes import routes_of
from tandem.errors import UserError
from tandem.pipeline.batch import lay_out
from tandem.pipeline.experience import assign_credit
from tandem.pipeline.loop import initial_kl_controller
from tandem.pipeline.microbatches import MemoryFit
from tandem.pipeline.phases import COMPUTED_SHARE, score_with_policy, update_policy
from tandem.pipeline.prefetch import finish_scoring
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    LossScale,
    PackedBatch,
    Prompt,
    Sample,
    Span,
    Trajectory,
    UpdateReport,
)
from tests.fakes.pipeline import FAILED, ImmediateRuntime, partial_context, scored_group

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=2"


class RecordingEngine:
    """A train engine that computes nothing and keeps what it was told."""

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self) -> None:
        self.scales: list[LossScale] = []
        self.num_sequences: list[int] = []
        self.targets: list[list[int]] = []
        self.temperatures: list[float] = []
        self.replays: list[bool] = []
        self.num_advances = 0

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Nothing is certain."""
        self.temperatures.append(temperature)
        return [
            Scores(
                torch.full((len(batch.target_R),), -0.5),
                _routes_of(batch) if batch.with_routes else None,
            )
            for batch in batches
        ]

    def update(
        self, batches: Sequence[PackedBatch], loss: Any, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """One optimizer step, of which the metrics are 1."""
        self.scales.append(scale)
        self.num_sequences.append(sum(batch.num_sequences for batch in batches))
        self.replays += [_replays(batch) for batch in batches]
        self.targets.append(sorted({t for batch in batches for t in batch.target_R.tolist()}))
        self.temperatures.append(temperature)
        metrics = {"actor/entropy": 1.0, "actor/pg_loss": 1.0}
        return UpdateReport(metrics, grad_norm=1.0, learning_rate=0.1, skipped=False)

    def advance_schedule(self) -> None:
        """One training step is over."""
        self.num_advances += 1


def _routes_of(batch: PackedBatch) -> Tensor:
    """Return routes in which each token's expert is its own number."""
    return batch.token_ids_T[:, None, None]


def _replays(batch: PackedBatch) -> bool:
    """Return whether each token has those routes. It must, if there are any."""
    routes_TLK = batch.routes_TLK
    assert routes_TLK is None or torch.equal(routes_TLK, _routes_of(batch))
    return routes_TLK is not None


def make_parts(engine: RecordingEngine, groups: Sequence[Group], *arguments: str) -> Any:
    """Only what the training half of a step reads."""
    keys = [f"data.train_batch_size={len(groups)}", "actor_rollout_ref.rollout.n=2", MINI]
    given: dict[str, Any] = {
        "config": load_config(RunConfig, [*keys, *arguments]).config,
        "runtime": ImmediateRuntime(),
        "engines": Engines(engine, engine, None, engine),  # type: ignore[arg-type]
        "preferred_tokens": None,
        "clock": lambda: 0.0,
        "memory": MemoryFit(),
    }
    return partial_context(**given)


def update(
    groups: Sequence[Group], *arguments: str, old_logp_R: Tensor | None = None
) -> tuple[RecordingEngine, list[UpdateReport]]:
    """All optimizer steps on the groups, which make one batch."""
    engine = RecordingEngine()
    parts = make_parts(engine, groups, *arguments)
    experience = assign_credit(
        replace(lay_out(groups), old_logp_R=old_logp_R),
        config=parts.config,
        controller=initial_kl_controller(parts.config),
    )
    return engine, asyncio.run(update_policy(parts, experience))


@pytest.mark.parametrize("mode", ["R2", "disabled"])
def test_mo8_updates_replay_the_experts_that_computed_old_log_probs(mode: str) -> None:
    """R2 forces the pass for old log-probs, although one optimizer step would not need it."""
    engine = RecordingEngine()
    groups = [scored_group(uid, 1.0, 0.0) for uid in range(2)]
    parts = make_parts(engine, groups, f"actor_rollout_ref.actor.router_replay.mode={mode}")
    batch = asyncio.run(finish_scoring(parts, lay_out(groups)))
    experience = assign_credit(
        batch, config=parts.config, controller=initial_kl_controller(parts.config)
    )
    asyncio.run(update_policy(parts, experience))
    assert (batch.old_logp_R is not None) == (mode == "R2")
    assert engine.replays == [mode == "R2"]


def _drawn(sample_id: int, *token_ids: int, prompt: tuple[int, ...] = (4,)) -> Sample:
    """Return a sample whose routes are the numbers of its tokens; an empty turn has none."""
    routes = np.array([*prompt, *token_ids[:-1]], np.uint8)[:, None, None]
    completion = Completion(
        sample_id,
        token_ids,
        (-0.5,) * len(token_ids),
        FinishReason.STOP,
        0,
        routes=routes if token_ids else None,
    )
    return Sample(Trajectory.of_single_turn(prompt, completion), "", FAILED)


def test_mo8_a_sample_without_routes_is_named_in_one_line() -> None:
    first, other = _drawn(3, 7, 8), _drawn(5, 7, 9)
    drawn = other.trajectory.spans[-1].completion
    assert drawn is not None
    lost = Trajectory.of_single_turn((4,), replace(drawn, routes=None))
    samples = (first, replace(other, trajectory=lost))
    groups = [Group(Prompt(0, 0, (4,), "", "source", ""), samples)]
    mode, records = "actor.router_replay.mode", "rollout.enable_rollout_routing_replay"
    parts = make_parts(RecordingEngine(), groups, f"actor_rollout_ref.{mode}=R3")
    with pytest.raises(UserError) as refused:
        asyncio.run(score_with_policy(parts, lay_out(groups)))
    assert str(refused.value) == (
        f"actor_rollout_ref.{mode}='R3': sample 5 has recorded experts for 0 of its 2 "
        "tokens; conversations that forked and rollout engines of your own have none. Set "
        f"actor_rollout_ref.{mode}=R2 or disabled, and actor_rollout_ref.{records}=False."
    )


def test_mo7_an_episode_without_a_turn_takes_no_routes_from_the_others() -> None:
    samples = (_drawn(0), _drawn(1, 7, 8, 9), _drawn(2, prompt=(5, 6)), _drawn(3, 1))
    groups = [Group(Prompt(0, 0, (4,), "", "source", ""), samples)]
    mode = "actor_rollout_ref.actor.router_replay.mode=R3"
    parts = make_parts(RecordingEngine(), groups, mode)
    scores = asyncio.run(score_with_policy(parts, lay_out(groups)))
    empty, first, other, second = scores.sequences
    assert _replays(pack([empty, first, second])), "the shared prompt has its own routes"
    packed = pack(scores.sequences)
    assert packed.routes_TLK is not None and len(packed.routes_TLK) == len(packed.token_ids_T)
    assert other.routes is not None and len(other.routes) == 2


def test_mo7_an_empty_turn_behind_others_needs_no_routes() -> None:
    spans = _drawn(1, 7, 8).trajectory.spans
    empty = Completion(1, (), (), FinishReason.FAILED, 0)
    row = Trajectory(1, (*spans, Span((5,)), Span((), empty)))
    found = routes_of(row)
    assert found is not None and found.ravel().tolist() == [4, 7, 7]


def test_sequences_without_signal_are_not_computed_but_count_in_the_denominators() -> None:
    engine, (report,) = update([scored_group(0, 1.0, 0.0), scored_group(1, 1.0, 1.0)])
    assert engine.scales == [LossScale(num_tokens=12, num_sequences=4)]
    assert engine.num_sequences == [2]
    assert report.metrics[COMPUTED_SHARE] == 0.5
    assert report.metrics["actor/pg_loss"] == 1.0
    assert report.metrics["actor/entropy"] == 2.0, "a mean over the tokens that were computed"


def test_all_are_computed_if_the_loss_has_other_terms() -> None:
    entropy = "actor_rollout_ref.actor.entropy_coeff=0.01"
    engine, (report,) = update([scored_group(0, 1.0, 0.0), scored_group(1, 1.0, 1.0)], entropy)
    assert engine.num_sequences == [4]
    assert report.metrics[COMPUTED_SHARE] == report.metrics["actor/entropy"] == 1.0


def test_all_are_computed_if_the_loss_moves_tokens_of_advantage_0() -> None:
    keys = ("policy_loss.loss_mode=dro", "policy_loss.dro_beta=0.1")
    actor_keys = (f"actor_rollout_ref.actor.{key}" for key in keys)
    engine, _ = update([scored_group(0, 1.0, 0.0), scored_group(1, 1.0, 1.0)], *actor_keys)
    assert engine.num_sequences == [4]


def test_rejected_tokens_and_sequences_count_in_the_denominators() -> None:
    """One of four sequences is rejected, and one token of another."""
    old_R = torch.full((12,), -0.5)
    old_R[:3] = -9.0
    old_R[4] = -9.0
    rejects = [
        "algorithm.rollout_correction.rollout_rs='seq_mean_k1,token_k1'",
        "algorithm.rollout_correction.rollout_rs_threshold='0.01_20,0.5_2'",
    ]
    groups = [scored_group(0, 1.0, 0.0), scored_group(1, 1.0, 0.0)]
    engine, (report,) = update(groups, *rejects, old_logp_R=old_R)
    assert engine.scales == [LossScale(num_tokens=12, num_sequences=4)]
    assert engine.num_sequences == [3]
    assert report.metrics["actor/entropy"] == 12 / 8, "a mean over the tokens that were computed"


def test_failed_rewards_count_in_no_denominator() -> None:
    engine, (report,) = update([scored_group(0, 1.0, 0.0), scored_group(1, None, 0.0)])
    assert engine.scales == [LossScale(num_tokens=9, num_sequences=3)]
    assert engine.num_sequences == [2]
    assert report.metrics[COMPUTED_SHARE] == pytest.approx(2 / 3)


def test_each_mini_batch_has_its_own_denominators_and_the_schedule_advances_once() -> None:
    groups = [
        scored_group(0, 1.0, 0.0),
        scored_group(1, None, 0.0),
        scored_group(2, 1.0, 1.0),
        scored_group(3, 0.0, 0.0),
    ]
    engine, reports = update(groups, "actor_rollout_ref.actor.ppo_epochs=2")
    assert [scale.num_sequences for scale in engine.scales] == [3, 4, 3, 4]
    assert engine.num_sequences == [2, 0, 2, 0]
    assert [report.metrics[COMPUTED_SHARE] for report in reports[:2]] == [pytest.approx(2 / 3), 0]
    assert reports[1].metrics["actor/pg_loss"] == 0
    assert engine.num_advances == 1


def test_shuffling_covers_a_batch_in_another_order_each_epoch() -> None:
    groups = [scored_group(uid, 1.0, 0.0) for uid in range(4)]
    keys = ("actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.actor.shuffle=True")
    engine, _ = update(groups, *keys)
    first, second = engine.targets[:2], engine.targets[2:]
    everything = [0, 1, 20, 21, 40, 41, 60, 61]
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == everything
    assert first != second
    unshuffled, _ = update(groups, keys[0])
    assert unshuffled.targets == [[0, 1, 20, 21], [40, 41, 60, 61]] * 2


def test_tokens_of_the_ranks_are_told() -> None:
    (_, reports) = update([scored_group(1, 1.0, 0.0), scored_group(2, 0.0, 1.0)])
    tokens = 4 * (1 + 3)
    for name in ("min", "max", "mean", "balanced_min", "balanced_max"):
        assert reports[0].metrics[f"global_seqlen/{name}"] == tokens
    assert reports[0].metrics["global_seqlen/minmax_diff"] == 0


def test_log_probs_and_updates_are_those_of_the_sampling_temperature() -> None:
    groups = [scored_group(uid, 1.0, 0.0) for uid in range(4)]
    temperature = "actor_rollout_ref.rollout.temperature=0.7"
    engine = RecordingEngine()
    parts = make_parts(engine, groups, temperature)
    scores = asyncio.run(score_with_policy(parts, lay_out(groups)))
    assert scores.old_logp_R is not None and len(scores.old_logp_R) == 24
    assert engine.temperatures == [0.7]
    assert update(groups, temperature)[0].temperatures == [0.7, 0.7]
