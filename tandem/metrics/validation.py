# SPDX-License-Identifier: Apache-2.0
"""Validation metrics under verl's names, ``val-core/<source>/<variable>/<statistic>``.

With N samples per prompt, the statistics are ``mean@N`` and ``std@N`` and, by 1000 bootstrap draws
of n = 2, 4, ..., N samples, ``best@n``, ``worst@n`` and ``maj@n`` (majority vote over predictions),
each with ``/mean`` and ``/std``. They are averaged over prompts. Results equal verl's
``process_validation_metrics`` with the same seed, except that a failed reward does not score 0: it
is excluded and counted in ``val-aux/<source>/failures/count``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from tandem.types import Group, RewardStatus

_NUM_DRAWS = 1000
_REWARD = "reward"
_ACCURACY = "acc"
_CORE_STATISTICS = ("mean@", "best@", "maj@")


@dataclass(frozen=True, slots=True)
class ValidationSample:
    """A scored sample.

    Attributes:
        data_source: the source by which metrics are grouped.
        row: the prompt's row in the data set.
        score: the score; None if the reward failed.
        extra: other numbers of the reward; ``acc`` replaces the score in ``val-core``.
        prediction: the answer for majority votes; None if the reward returns none.
    """

    data_source: str
    row: int
    score: float | None
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    prediction: str | None = None


def validation_samples(groups: Iterable[Group]) -> list[ValidationSample]:
    return [
        ValidationSample(
            data_source=group.prompt.data_source,
            row=group.prompt.row,
            score=sample.reward.score if sample.reward.status is RewardStatus.VALUE else None,
            extra=sample.reward.extra,
            prediction=sample.reward.prediction,
        )
        for group in groups
        for sample in group.samples
    ]


def validation_metrics(samples: Iterable[ValidationSample], *, seed: int = 42) -> dict[str, float]:
    """Compute all metrics of one validation; ``seed`` fixes the bootstrap draws."""
    sources: dict[str, dict[int, list[ValidationSample]]] = {}
    for sample in samples:
        prompts = sources.setdefault(sample.data_source, {})
        prompts.setdefault(sample.row, []).append(sample)
    metrics: dict[str, float] = {}
    for source, prompts in sources.items():
        metrics.update(_source_metrics(source, list(prompts.values()), seed=seed))
    return metrics


def _source_metrics(
    source: str, prompts: Sequence[Sequence[ValidationSample]], *, seed: int
) -> dict[str, float]:
    by_variable: dict[str, dict[str, list[float]]] = {}
    for samples in prompts:
        for variable, prompt_metrics in _prompt_metrics(samples, seed).items():
            collected = by_variable.setdefault(variable, {})
            for name, value in prompt_metrics.items():
                collected.setdefault(name, []).append(value)

    core_variable = _ACCURACY if _ACCURACY in by_variable else _REWARD
    metrics: dict[str, float] = {}
    for variable, collected in by_variable.items():
        largest = max(_num_samples(name) for name in collected)
        for name, values in collected.items():
            is_core = (
                variable == core_variable
                and name.startswith(_CORE_STATISTICS)
                and _num_samples(name) == largest
            )
            section = "val-core" if is_core else "val-aux"
            metrics[f"{section}/{source}/{variable}/{name}"] = statistics.fmean(values)
    failures = sum(sample.score is None for samples in prompts for sample in samples)
    if failures:
        metrics[f"val-aux/{source}/failures/count"] = float(failures)
    return metrics


def _prompt_metrics(samples: Sequence[ValidationSample], seed: int) -> dict[str, dict[str, float]]:
    """Compute a prompt's statistics by variable; N counts failed samples, too."""
    scored = [sample for sample in samples if sample.score is not None]
    predictions = [sample.prediction for sample in scored]
    columns: dict[str, list[float]] = {}
    for sample in scored:
        for variable, value in {**sample.extra, _REWARD: sample.score}.items():
            columns.setdefault(variable, []).append(float(value))
    return {
        variable: _statistics(values, predictions, num_samples=len(samples), seed=seed)
        for variable, values in columns.items()
    }


def _statistics(
    values: Sequence[float],
    predictions: Sequence[str | None],
    *,
    num_samples: int,
    seed: int,
) -> dict[str, float]:
    metrics = {f"mean@{num_samples}": statistics.fmean(values)}
    if num_samples == 1:
        return metrics
    metrics[f"std@{num_samples}"] = statistics.pstdev(values)
    values_N = np.asarray(values)
    votes_N = _vote_codes(predictions) if len(predictions) == len(values) else None
    for size in _subset_sizes(num_samples):
        draws_BN = _draws(len(values), size, seed=seed)
        drawn_BN = values_N[draws_BN]
        metrics.update(_mean_and_std(f"best@{size}", drawn_BN.max(axis=1)))
        metrics.update(_mean_and_std(f"worst@{size}", drawn_BN.min(axis=1)))
        if votes_N is not None:
            winner_B1 = _majority_positions(votes_N[draws_BN])
            majority_B1 = np.take_along_axis(drawn_BN, winner_B1, axis=1)
            metrics.update(_mean_and_std(f"maj@{size}", majority_B1))
    return metrics


def _subset_sizes(num_samples: int) -> list[int]:
    """Return 2, 4, 8, ... below ``num_samples``, then ``num_samples``."""
    sizes: list[int] = []
    size = 2
    while size < num_samples:
        sizes.append(size)
        size *= 2
    return [*sizes, num_samples]


@lru_cache(maxsize=32)
def _draws(num_values: int, size: int, *, seed: int) -> np.ndarray:
    """Draw the bootstrap indices, (1000, size), with numpy's legacy generator, as in verl."""
    # Cached, because prompts with equal numbers of values share the draws.
    return np.random.RandomState(seed).choice(num_values, size=(_NUM_DRAWS, size), replace=True)


def _vote_codes(predictions: Sequence[str | None]) -> np.ndarray | None:
    """Number the distinct predictions; return None if a sample has none."""
    codes: dict[str, int] = {}
    votes: list[int] = []
    for prediction in predictions:
        if prediction is None:
            return None
        votes.append(codes.setdefault(prediction, len(codes)))
    return np.asarray(votes)


def _majority_positions(votes_BN: np.ndarray) -> np.ndarray:
    """Return the first position of each row's most frequent vote, (B, 1); ties go to the first."""
    counts_BN = np.zeros_like(votes_BN)
    for code in np.unique(votes_BN):
        same_BN = votes_BN == code
        counts_BN += same_BN * same_BN.sum(axis=1, keepdims=True)
    return counts_BN.argmax(axis=1)[:, None]


def _mean_and_std(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": float(values.mean()), f"{name}/std": float(values.std())}


def _num_samples(name: str) -> int:
    """Return the N of ``best@N/mean``."""
    return int(name.partition("@")[2].partition("/")[0])
