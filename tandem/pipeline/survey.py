# SPDX-License-Identifier: Apache-2.0
"""The survey of a mini-batch: the columns of its loss that depend on all of its tokens under the
current policy.

The policy scores the mini-batch before its optimizer step, so that the columns do not depend on how
micro-batches are formed. ``RunConfig.surveys_mini_batches`` asks for this pass. The first optimizer
step on a batch takes the old log-probs instead, if they are those of the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.policy_loss import PolicyLoss
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience
from tandem.pipeline.optimizer_steps import limits_of, score_sequences
from tandem.types import LossColumns


async def survey(
    context: RunContext,
    experience: Experience,
    *,
    loss: PolicyLoss,
    members: Sequence[int],
    number: int,
) -> Experience:
    """Return the experience with the surveyed columns of a mini-batch.

    Without old log-probs in the result, the policy is the one before the update.

    Args:
        members: the sequences of the mini-batch.
        number: the number of optimizer steps that were taken on this batch.
    """
    lengths_N = torch.tensor([row.num_loss_tokens for row in experience.sequences])
    chosen = [i for i in members if lengths_N[i] > 0]
    if not chosen:
        return experience
    index_M = torch.cat([_tokens_of(i, lengths_N) for i in chosen])
    columns = experience.columns.map(lambda column_R: column_R[index_M])
    config = context.config
    bypasses = config.algorithm.rollout_correction.bypass_mode
    is_old_policy = number == 0 and experience.batch.policy_lag == 0 and not bypasses
    logp_M = columns.old_logp_R if is_old_policy else None
    if logp_M is None:
        logp_M = await score_sequences(
            context,
            context.engines.train,
            sequences=[experience.sequences[i] for i in chosen],
            limits=limits_of(context, "logp"),
            temperature=config.actor_rollout_ref.rollout.temperature,
        )
    surveyed = loss.survey(
        logp_M,
        columns,
        sequence_R=torch.repeat_interleave(lengths_N[chosen]),
        random=np.random.default_rng(_seed(context, experience, number=number)),
    )
    completed = _spread(experience.columns, surveyed, index_M=index_M)
    if is_old_policy:
        # The ratio is exactly 1. Rounding would decide the sign of kl_cov's gradient, which is a
        # difference of log-probs by its sign alone.
        completed = replace(completed, old_logp_R=None)
    return replace(experience, columns=completed)


def _seed(context: RunContext, experience: Experience, *, number: int) -> list[int]:
    """Return a seed that no other mini-batch of the run has: prompts have numbers of their own."""
    seed = context.config.actor_rollout_ref.rollout.seed
    return [seed, int(experience.batch.group_N[0]), number]


def _tokens_of(sequence: int, lengths_N: Tensor) -> Tensor:
    start = int(lengths_N[:sequence].sum())
    return torch.arange(start, start + int(lengths_N[sequence]))


def _spread(columns: LossColumns, surveyed: LossColumns, *, index_M: Tensor) -> LossColumns:
    """Return the columns of all tokens with what the survey has found for some of them."""
    total = len(columns.advantages_R)
    found: dict[str, Tensor] = {}
    for name in ("marked_R", "weights_R"):
        column_M = getattr(surveyed, name)
        if column_M is not None:
            found[name] = column_M.new_zeros(total).index_copy(0, index_M, column_M)
    return replace(columns, **found)
