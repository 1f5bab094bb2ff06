# SPDX-License-Identifier: Apache-2.0
"""How the values of one metric become the one that is logged for a step.

verl guesses from the name (one that contains "max" is maximised, and so on). Here every metric is
averaged unless its reduction is stated, so that a name never changes a number. Nothing here knows
of processes: metrics arrive already divided by their global denominators (see ``LossOutputs``).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum

from tandem.types import UpdateReport


class Reduction(Enum):
    """What to do with several values of one metric."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    SUM = "sum"
    LAST = "last"


_REDUCERS: dict[Reduction, Callable[[Sequence[float]], float]] = {
    Reduction.MEAN: statistics.fmean,
    Reduction.MAX: max,
    Reduction.MIN: min,
    Reduction.SUM: math.fsum,
    Reduction.LAST: lambda values: values[-1],
}


def reduce_values(values: Sequence[float], reduction: Reduction) -> float:
    """One number from at least one. NaN among ``values`` gives NaN, except with LAST."""
    if not values:
        raise ValueError(f"values={values!r}: there is nothing to reduce. Pass at least one.")
    if reduction is not Reduction.LAST and any(math.isnan(value) for value in values):
        return math.nan
    return float(_REDUCERS[reduction](values))


def reduce_metrics(
    parts: Iterable[Mapping[str, float]], reductions: Mapping[str, Reduction]
) -> dict[str, float]:
    """Merge the metrics of several mini-batches, each name over the parts that have it.

    Args:
        parts: one mapping a mini-batch, in order.
        reductions: the reduction of each name that is not averaged.
    """
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {
        name: reduce_values(seen, reductions.get(name, Reduction.MEAN))
        for name, seen in values.items()
    }


def update_metrics(reports: Sequence[UpdateReport], role: str = "actor") -> dict[str, float]:
    """The ``actor/*`` metrics of the optimizer steps of one training step, under verl's names, or
    those of another ``role``.

    Metrics of a loss are averaged over the steps that were taken; ``actor/lr`` is the last one in
    force; ``actor/skipped_updates`` counts steps not taken because loss or gradient was not finite.
    """
    taken = [report for report in reports if not report.skipped]
    metrics = reduce_metrics(
        [{**report.metrics, "grad_norm": report.grad_norm} for report in taken], reductions={}
    )
    named = {name if "/" in name else f"{role}/{name}": value for name, value in metrics.items()}
    if reports:
        named[f"{role}/lr"] = reports[-1].learning_rate
        named[f"{role}/skipped_updates"] = float(len(reports) - len(taken))
    return named
