# SPDX-License-Identifier: Apache-2.0
"""The critic's part of a step: values before the advantages, then its optimizer steps.

Every sequence whose reward has a value is computed, whatever its advantage: the critic learns from
those that came out as it expected, too.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.value_loss import ValueLoss
from tandem.config.schema.run import RunConfig
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience, ScoredBatch
from tandem.pipeline.microbatches import MicrobatchLimits
from tandem.pipeline.optimizer_steps import Updates, rows_to_train, score_sequences, take_steps
from tandem.types import LossColumns, UpdateReport

_NO_TEMPERATURE = 1.0


async def score_with_critic(parts: RunContext, batch: ScoredBatch) -> Tensor | None:
    """Values of the response tokens under the current weights, or None without a critic."""
    critic, config = parts.engines.critic, parts.config.critic
    if critic is None:
        return None
    limits = MicrobatchLimits(
        key="critic.forward_max_token_len_per_gpu",
        max_sequences=config.forward_micro_batch_size_per_gpu,
        max_tokens=config.forward_tokens,
        preferred_tokens=None if config.use_dynamic_bsz else parts.preferred_tokens,
        by_cost=parts.config.trainer.balance_batch,
    )
    return await score_sequences(
        parts, critic, sequences=batch.sequences, limits=limits, temperature=_NO_TEMPERATURE
    )


async def update_critic(parts: RunContext, experience: Experience) -> list[UpdateReport]:
    """All optimizer steps of the critic on one batch, in order."""
    critic, config = parts.engines.critic, parts.config.critic
    assert critic is not None and experience.values_R is not None, "the run has a critic"
    columns = LossColumns(
        advantages_R=experience.columns.advantages_R,
        values_R=experience.values_R,
        returns_R=experience.returns_R,
    )
    rows = rows_to_train(experience, columns, computed_N=experience.batch.valid_N)
    limits = MicrobatchLimits(
        key="critic.ppo_max_token_len_per_gpu",
        max_sequences=config.ppo_micro_batch_size_per_gpu,
        max_tokens=config.microbatch_tokens,
        preferred_tokens=None if config.use_dynamic_bsz else parts.preferred_tokens,
        by_cost=parts.config.trainer.balance_batch,
    )
    updates = Updates(
        critic,
        value_loss(parts.config),
        limits,
        temperature=_NO_TEMPERATURE,
        size=config.ppo_mini_batch_size * parts.config.actor_rollout_ref.rollout.n,
        num_epochs=config.ppo_epochs,
        shuffle_seed=config.data_loader_seed if config.shuffle else None,
    )
    return [step.report for step in await take_steps(parts, rows, updates=updates)]


def value_loss(config: RunConfig) -> ValueLoss:
    """The critic's loss as the config describes it."""
    critic = config.critic
    return ValueLoss(
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
        loss_scale_factor=critic.loss_scale_factor or config.data.max_response_length,
    )
