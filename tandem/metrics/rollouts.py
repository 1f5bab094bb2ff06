# SPDX-License-Identifier: Apache-2.0
"""Metrics of the rollouts of one step, under verl's names.

A failed reward never counts as 0: ``critic/score`` and ``critic/rewards`` exclude it, and
``reward/timeouts``, ``reward/errors`` and ``reward/failures`` count it. A statistic without values
is omitted. Lengths are in tokens. As in verl, prompt statistics count a prompt once per sample.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tandem.types import Group, RewardStatus, Sample

if TYPE_CHECKING:
    from torch import Tensor


def score_metrics(groups: Sequence[Group], *, rewards: Sequence[float]) -> dict[str, float]:
    """Compute statistics of the scores, and of the rewards after any KL penalty.

    Args:
        rewards: the reward of each sample in the order of ``groups``, ignored for failed samples.
    """
    scored = [
        (sample, reward)
        for sample, reward in zip(_samples(groups), rewards, strict=True)
        if _has_score(sample) and sample.trajectory.num_drawn_tokens > 0
    ]
    return {
        **_statistics("critic/score", [sample.reward.score for sample, _ in scored]),
        **_statistics("critic/rewards", [reward for _, reward in scored]),
    }


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute the means of the reward's other numbers, and count its failures by kind.

    ``reward/zero_variance_group_ratio`` is the share of groups whose scores are all equal, among
    those with at least two. Their group-relative advantages are 0: they have no training signal.
    """
    samples = _samples(groups)
    extras: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward.extra.items() if _has_score(sample) else ():
            extras.setdefault(name, []).append(value)
    timeouts = sum(sample.reward.status is RewardStatus.TIMEOUT for sample in samples)
    errors = sum(sample.reward.status is RewardStatus.ERROR for sample in samples)
    metrics = {f"reward/{name}/mean": statistics.fmean(values) for name, values in extras.items()}
    metrics["reward/timeouts"] = float(timeouts)
    metrics["reward/errors"] = float(errors)
    metrics["reward/failures"] = float(timeouts + errors)
    comparable = [scores for scores in map(_scores, groups) if len(scores) > 1]
    if comparable:
        metrics["reward/zero_variance_group_ratio"] = statistics.fmean(
            min(scores) == max(scores) for scores in comparable
        )
    return metrics


def advantage_metrics(advantages_R: Tensor, *, returns_R: Tensor) -> dict[str, float]:
    """Compute statistics over the R loss tokens; both tensors are (R,)."""
    return {
        **_tensor_statistics("critic/advantages", advantages_R),
        **_tensor_statistics("critic/returns", returns_R),
    }


def length_metrics(
    groups: Sequence[Group], *, max_prompt_length: int, max_response_length: int
) -> dict[str, float]:
    """Compute statistics of the lengths of prompts and responses, in tokens.

    ``clip_ratio`` is the share of sequences with the maximum length. A response without tokens
    counts as aborted; ``response_length_non_aborted/*`` excludes it.
    """
    responses = [len(sample.trajectory.response_ids) for sample in _samples(groups)]
    prompts = [len(group.prompt.token_ids) for group in groups for _ in group.samples]
    finished = [length for length in responses if length > 0]
    if not responses:
        return {}
    return {
        **_length_statistics("response_length", responses, limit=max_response_length),
        **_length_statistics("response_length_non_aborted", finished, limit=max_response_length),
        "response/aborted_ratio": 1 - len(finished) / len(responses),
        **_length_statistics("prompt_length", prompts, limit=max_prompt_length),
    }


def _samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def _has_score(sample: Sample) -> bool:
    return sample.reward.status is RewardStatus.VALUE


def _scores(group: Group) -> list[float]:
    return [sample.reward.score for sample in group.samples if _has_score(sample)]


def _statistics(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        f"{name}/mean": statistics.fmean(values),
        f"{name}/max": float(max(values)),
        f"{name}/min": float(min(values)),
    }


def _length_statistics(name: str, lengths: Sequence[int], *, limit: int) -> dict[str, float]:
    if not lengths:
        return {}
    clipped = sum(length == limit for length in lengths)
    return {**_statistics(name, lengths), f"{name}/clip_ratio": clipped / len(lengths)}


def _tensor_statistics(name: str, values_R: Tensor) -> dict[str, float]:
    if values_R.numel() == 0:
        return {}
    return {
        f"{name}/mean": values_R.mean().item(),
        f"{name}/max": values_R.max().item(),
        f"{name}/min": values_R.min().item(),
    }
