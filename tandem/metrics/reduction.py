# SPDX-License-Identifier: Apache-2.0
"""The reduction of the metrics of several optimizer steps to those of a training step.

verl guesses the reduction from the name (a name with "max" is maximised, and so on). Here every
metric is averaged, whatever its name. Metrics are already divided by their global denominators (see
``LossOutputs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

from tandem.types import UpdateReport


def update_metrics(reports: Sequence[UpdateReport], role: str = "actor") -> dict[str, float]:
    """Reduce the reports of one training step to metrics under verl's names.

    Metrics of a loss are averaged over the steps that were not skipped. ``<role>/lr`` is the
    learning rate of the last step. ``<role>/skipped_updates`` counts the steps that were skipped
    because the loss or the gradient was not finite.
    """
    taken = [report for report in reports if not report.skipped]
    values: dict[str, list[float]] = {}
    for report in taken:
        for name, value in {**report.metrics, "grad_norm": report.grad_norm}.items():
            values.setdefault(name if "/" in name else f"{role}/{name}", []).append(value)
    named = {name: _mean(seen) for name, seen in values.items()}
    if reports:
        named[f"{role}/lr"] = reports[-1].learning_rate
        named[f"{role}/skipped_updates"] = float(len(reports) - len(taken))
    return named


def _mean(values: Sequence[float]) -> float:
    """Average; unlike ``fsum``, accept infinities of both signs."""
    total = fsum(values) if all(map(isfinite, values)) else sum(values)
    return total / len(values)
