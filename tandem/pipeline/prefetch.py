# SPDX-License-Identifier: Apache-2.0
"""The next batch, from groups to log-probs, as far as that can go on while this one is trained on.

What is frozen computes ahead, reference and reward model (where they share the trainer's devices,
their passes fall between those of the trainer); the policy's own log-probs only if somebody else
than the trainer computes them. In rounds those are computed in turn, so that their version is
fixed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.critic_phase import score_with_critic
from tandem.pipeline.experience import ScoredBatch, lay_out
from tandem.pipeline.policy_phase import score_with_policy, score_with_reference
from tandem.pipeline.reward_phase import score_with_reward_model
from tandem.types import Group

T = TypeVar("T")
TimedScores = tuple[Tensor | None, float]
"""Log-probs or values (R,), and the seconds they took."""


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch on its way to the trainer.

    Attributes:
        old_logp_R: None also where the trainer is to compute them, see ``scores_ahead``.
        generated_s, taken_s: when its last sequence was generated, and the batch formed, by the
            clock of the run.
        policy_lag: versions that the weights which computed ``old_logp_R`` are behind, else 0.
        policy_s, reference_s: what its log-probs took; ``reward_s`` its reward model.
        num_left: complete groups that were left for later batches.
    """

    scored: ScoredBatch
    old_logp_R: Tensor | None
    ref_logp_R: Tensor | None
    generated_s: float
    taken_s: float
    policy_lag: int
    policy_s: float
    reference_s: float
    reward_s: float
    num_left: int

    @property
    def lag_metrics(self) -> dict[str, float]:
        """What waits behind this batch, and how old the weights of its log-probs are."""
        return {
            "pipeline/buffered_groups": float(self.num_left),
            "training/lag/old_log_prob": float(self.policy_lag),
        }


def scores_ahead(parts: RunContext) -> bool:
    """Whether the policy's log-probs of a batch are computed while another one is trained on."""
    in_turn = parts.config.trainer.in_rounds
    return parts.engines.scorer is not parts.engines.train and not in_turn


async def prepare_batch(
    parts: RunContext, buffer: GroupBuffer, *, version: int, in_use: Callable[[], int]
) -> PreparedBatch | None:
    """The batch that the weights ``version`` are to be trained on; None if there is no more.

    Args:
        in_use: the version that everybody but the trainer uses.
    """
    groups = await buffer.take(version)
    if len(groups) < parts.config.data.train_batch_size:
        return None
    taken_s, num_left = parts.clock(), buffer.num_complete
    is_scored = scores_ahead(parts) and parts.config.needs_old_log_probs
    policy_lag = version - in_use() if is_scored else 0
    batch = lay_out(groups, version=version)
    async with asyncio.TaskGroup() as passes:
        scored = passes.create_task(timed_rewards(parts, groups))
        reference = passes.create_task(timed_reference(parts, batch))
        policy = passes.create_task(timed_policy(parts, batch)) if scores_ahead(parts) else None
    old_logp_R, policy_s = (None, 0.0) if policy is None else policy.result()
    ref_logp_R, reference_s = reference.result()
    scored_groups, reward_s = scored.result()
    return PreparedBatch(
        scored=batch if scored_groups is groups else lay_out(scored_groups, version=version),
        old_logp_R=old_logp_R,
        ref_logp_R=ref_logp_R,
        generated_s=max(group.generated_s for group in groups),
        taken_s=taken_s,
        policy_lag=policy_lag,
        policy_s=policy_s,
        reference_s=reference_s,
        reward_s=reward_s,
        num_left=num_left,
    )


async def timed_policy(parts: RunContext, batch: ScoredBatch) -> TimedScores:
    """Old log-probs, if something reads them."""
    if not parts.config.needs_old_log_probs:
        return await score_with_policy(parts, batch), 0.0
    return await _timed(parts, "logp", scores=score_with_policy(parts, batch))


async def timed_reference(parts: RunContext, batch: ScoredBatch) -> TimedScores:
    """Reference log-probs, if something reads them."""
    if not parts.config.needs_reference:
        return None, 0.0
    return await _timed(parts, "ref_logp", scores=score_with_reference(parts, batch))


async def timed_rewards(
    parts: RunContext, groups: Sequence[Group]
) -> tuple[Sequence[Group], float]:
    """The groups with the scores of a reward model; as they are without one."""
    if parts.engines.reward_model is None:
        return groups, 0.0
    scores = score_with_reward_model(parts, groups)
    return await _timed(parts, "reward", scores=scores, name="reward model")


async def timed_values(parts: RunContext, batch: ScoredBatch) -> TimedScores:
    """The critic's values. They are the trainer's to compute, as its updates change them."""
    return await _timed(parts, "actor-train", scores=score_with_critic(parts, batch), name="values")


async def _timed(
    parts: RunContext, role: str, *, scores: Awaitable[T], name: str | None = None
) -> tuple[T, float]:
    begin_s = parts.clock()
    with parts.trace.span(role, name or role):
        scored = await scores
    return scored, parts.clock() - begin_s
