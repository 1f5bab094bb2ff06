# SPDX-License-Identifier: Apache-2.0
"""How the metrics of several optimizer steps become those that are logged for a training step.

verl guesses from the name (one that contains "max" is maximised, and so on). Here every metric is
averaged, so that a name never changes a number. Nothing here knows of processes: metrics arrive
already divided by their global denominators (see ``LossOutputs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite

from tandem.types import UpdateReport


def update_metrics(reports: Sequence[UpdateReport], role: str = "actor") -> dict[str, float]:
    """The ``actor/*`` metrics of the optimizer steps of one training step, under verl's names, or
    those of another ``role``.

    Metrics of a loss are averaged over the steps that were taken; ``actor/lr`` is the last one in
    force; ``actor/skipped_updates`` counts steps not taken because loss or gradient was not finite.
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
    """NaN of both infinities, which ``fsum`` refuses."""
    total = fsum(values) if all(map(isfinite, values)) else sum(values)
    return total / len(values)
