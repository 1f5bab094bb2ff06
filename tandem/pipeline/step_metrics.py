# SPDX-License-Identifier: Apache-2.0
"""The metrics of one training step, under verl's names."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.metrics.custom import StepBatch, custom_metrics
from tandem.metrics.episodes import episode_metrics
from tandem.metrics.rollouts import (
    advantage_metrics,
    length_metrics,
    reward_metrics,
    score_metrics,
)
from tandem.metrics.throughput import (
    StepTime,
    actor_utilisation_metrics,
    memory_metrics,
    throughput_metrics,
    timing_metrics,
)
from tandem.pipeline.batch import Batch, as_floats
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience

_VARIANCE_EPSILON = 1e-5
"""The constant of verl, which keeps the explained variance finite."""


def batch_metrics(
    context: RunContext, experience: Experience, *, kl_coefficient: float
) -> dict[str, float]:
    """Compute metrics of the batch: scores, advantages, lengths, agreement of rollout and trainer.

    The metrics depend on data and weights only.

    Args:
        kl_coefficient: the coefficient of the KL that was subtracted from the rewards, if any was.
    """
    groups = experience.batch.groups
    data, algorithm = context.config.data, context.config.algorithm
    metrics = {
        **score_metrics(groups, rewards=as_floats(experience.rewards_N)),
        **reward_metrics(groups),
        **advantage_metrics(experience.advantages_R, returns_R=experience.returns_R),
        **length_metrics(
            groups,
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
        ),
        **episode_metrics(groups),
        **value_metrics(experience),
        **rollout_difference(experience),
        **experience.correction_metrics,
    }
    if context.config.trainer.max_lag > 0:
        metrics |= token_lag_metrics(experience.batch)
        metrics["pipeline/buffered_groups"] = float(experience.batch.num_left)
        metrics["training/lag/old_log_prob"] = float(experience.batch.policy_lag)
    if algorithm.use_kl_in_reward:
        metrics["actor/reward_kl_penalty"] = experience.mean_kl
        metrics["actor/reward_kl_penalty_coeff"] = kl_coefficient
    if context.config.actor_rollout_ref.actor.use_kl_loss:
        metrics["actor/kl_coef"] = context.config.actor_rollout_ref.actor.kl_loss_coef
    return metrics


def own_metrics(context: RunContext, experience: Experience, *, step: int) -> dict[str, float]:
    """Compute the metrics of the functions that ``trainer.metrics`` names."""
    batch = experience.batch
    described = StepBatch(
        step=step,
        groups=batch.groups,
        sequence_R=batch.sequence_R,
        rewards_N=experience.rewards_N,
        advantages_R=experience.advantages_R,
        returns_R=experience.returns_R,
        rollout_logp_R=batch.rollout_logp_R,
        lag_R=batch.lag_R,
    )
    return custom_metrics(context.config.trainer.metrics, described)


def speed_metrics(
    context: RunContext, experience: Experience, *, seconds: Mapping[str, float], wall_s: float
) -> dict[str, float]:
    """Compute metrics of the speed and the memory of a step.

    Args:
        seconds: the duration of each section of the step, as the timers measured it.
        wall_s: the seconds since the end of the step before.
    """
    groups, sequences = experience.batch.groups, experience.batch.sequences
    num_prompt_tokens = sum(len(group.prompt.token_ids) * len(group.samples) for group in groups)
    num_response_tokens = sum(sequence.num_response_tokens for sequence in sequences)
    lengths = [sequence.num_tokens for sequence in sequences]
    return {
        **timing_metrics(
            seconds, num_prompt_tokens=num_prompt_tokens, num_response_tokens=num_response_tokens
        ),
        **throughput_metrics(
            sum(lengths),
            time=StepTime(step_s=seconds["step"], wall_s=wall_s),
            num_devices=context.facts.num_devices,
        ),
        **actor_utilisation_metrics(
            lengths,
            seconds=seconds.get("update_actor", 0.0),
            num_epochs=context.config.actor_rollout_ref.actor.ppo_epochs,
            facts=context.facts,
        ),
        **memory_metrics(context.allocated_bytes(), reserved_bytes=context.reserved_bytes()),
    }


def token_lag_metrics(batch: Batch) -> dict[str, float]:
    """Compute ``training/lag/*``: the mean over tokens, and the maximum and shares over samples.

    The lag of a sample is that of its oldest token.
    """
    oldest_N = torch.full((len(batch.sequences),), -1)
    oldest_N = oldest_N.scatter_reduce(0, batch.sequence_R, batch.lag_R, "amax")
    lags = oldest_N[oldest_N >= 0]
    if len(lags) == 0:
        return {}
    shares = torch.bincount(lags) / len(lags)
    return {
        "training/lag/mean": batch.lag_R.float().mean().item(),
        "training/lag/max": float(lags.max().item()),
        **{f"training/lag/share/lag_{lag}": s for lag, s in enumerate(as_floats(shares))},
    }


def value_metrics(experience: Experience) -> dict[str, float]:
    """Compute statistics of the critic's values, and the share of the returns' variance that they
    explain, over the tokens whose reward has a value; none without a critic.
    """
    batch, values_R = experience.batch, experience.batch.values_R
    if values_R is None:
        return {}
    counted_R = batch.valid_N[batch.sequence_R]
    values_R, returns_R = values_R[counted_R], experience.returns_R[counted_R]
    if len(values_R) < 2:
        return {}
    explained = 1 - (returns_R - values_R).var() / (returns_R.var() + _VARIANCE_EPSILON)
    return {
        "critic/values/mean": values_R.mean().item(),
        "critic/values/max": values_R.max().item(),
        "critic/values/min": values_R.min().item(),
        "critic/vf_explained_var": explained.item(),
    }


def rollout_difference(experience: Experience) -> dict[str, float]:
    """Compute the differences between the trainer's and the rollout's probabilities of the drawn
    tokens; none unless the trainer scored the batch.
    """
    old_logp_R, rollout_logp_R = experience.batch.old_logp_R, experience.batch.rollout_logp_R
    if old_logp_R is None or old_logp_R is rollout_logp_R or len(rollout_logp_R) == 0:
        return {}
    trainer_R, rollout_R = old_logp_R.exp(), rollout_logp_R.exp()
    difference_R = (trainer_R - rollout_R).abs()
    logp_difference_R = (old_logp_R - rollout_logp_R).abs()
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": difference_R.max().item(),
        "training/rollout_probs_diff_mean": difference_R.mean().item(),
        "training/rollout_probs_diff_std": _std(difference_R),
        "training/rollout_actor_probs_pearson_corr": _correlation(trainer_R, rollout_R),
        "training/rollout_logp_diff_mean": logp_difference_R.mean().item(),
        "training/rollout_logp_diff_max": logp_difference_R.max().item(),
    }


def _correlation(first: Tensor, second: Tensor) -> float:
    """Return Pearson's coefficient, or 1 where it is undefined: for a constant series."""
    if len(first) < 2:
        return 1.0
    correlation = torch.corrcoef(torch.stack([first, second]).double())[0, 1].item()
    return correlation if math.isfinite(correlation) else 1.0


def _std(values: Tensor) -> float:
    return values.std().item() if len(values) > 1 else 0.0
