# SPDX-License-Identifier: Apache-2.0
"""The difference between two runs of one recipe.

This is the precision procedure of verl's Ascend tables, with further numbers that show whether a
difference is significant. It compares the series of one metric over the common steps.
docs/compare.md explains each number.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.errors import UserError
from tandem.report.compare_sources import MetricLog

LIMITS_PERCENT = {"critic/rewards/mean": 4.0, "train/loss": 2.0}
"""The published limits of the mean absolute error, by metric."""
THROUGHPUT = "perf/throughput"
STEP_SECONDS = ("perf/time_per_step", "timing_s/step", "train/time(s)")
"""The metrics of the time of a step; the first one that both runs have is used."""
FIRST_STEPS = 4
"""The number of steps whose mean is the published throughput."""

Column = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Deviation:
    """The distance of series b from series a over their common steps, not in percent.

    Attributes:
        steps: the common steps.
        mean_absolute: the mean of ``|b - a|``, not normalised.
        largest, largest_step: the largest ``|b - a|``, and its step.
        bias: the mean of ``b - a``.
        relative: ``mean_absolute`` over the mean of ``|a|``; infinite if that is 0.
        num_broken: the number of common steps with a value that is not finite, excluded above.
        num_single: the number of steps that only one of the series has.
        is_constant: whether series a has a single value at these steps.
    """

    steps: tuple[int, ...]
    mean_absolute: float
    largest: float
    largest_step: int
    bias: float
    relative: float
    num_broken: int
    num_single: int
    is_constant: bool = False


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quantity of both runs, and a ratio that is below 1 if B is slower."""

    a: float
    b: float
    value: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two runs; a field is None if the runs lack its metrics.

    Attributes:
        limit_percent: the limit of ``100 * deviation.mean_absolute``.
        first_throughput: the means over the first ``FIRST_STEPS`` logged steps.
        steady_throughput: the medians over the common steps after those.
        total_time: the seconds of the common steps.
        noise: the deviation of each repetition from its side, ``A`` or ``B``.
    """

    metric: str
    limit_percent: float
    deviation: Deviation
    first_throughput: Ratio | None
    steady_throughput: Ratio | None
    total_time: Ratio | None
    noise: Mapping[str, Deviation]

    @property
    def is_within_limit(self) -> bool:
        """Whether the mean absolute error is within the limit and all values are finite."""
        error = 100 * self.deviation.mean_absolute
        return not self.deviation.num_broken and error <= self.limit_percent

    @property
    def noise_floor(self) -> float | None:
        """The largest mean absolute error between repetitions of one run."""
        return max((deviation.mean_absolute for deviation in self.noise.values()), default=None)


@dataclass(frozen=True, slots=True)
class Pair:
    """A reference run ``a``, a run ``b``, and optional repetitions of each."""

    a: MetricLog
    b: MetricLog
    repeat_a: MetricLog | None = None
    repeat_b: MetricLog | None = None


def choose_metric(pair: Pair, wanted: str | None) -> str:
    """Return the wanted metric, or the first one with a published limit that both runs have.

    Raises:
        UserError: a run does not log the metric, or there is none to choose.
    """
    sides = {"A": pair.a, "B": pair.b, "--repeat-a": pair.repeat_a, "--repeat-b": pair.repeat_b}
    logs = {key: log for key, log in sides.items() if log is not None}
    if wanted is None:
        for name in LIMITS_PERCENT:
            if name in pair.a.columns and name in pair.b.columns:
                wanted = name
                break
        else:
            raise UserError(
                f"A={str(pair.a.path)!r}, B={str(pair.b.path)!r}",
                rule=f"do not both log one of {', '.join(LIMITS_PERCENT)}",
                remedy="Choose another metric with --metric and --limit.",
            )
    for key, log in logs.items():
        if wanted not in log.columns:
            close = difflib.get_close_matches(wanted, log.columns, n=3, cutoff=0.3)
            near = f" (it logs {', '.join(close)})" if close else ""
            raise UserError(
                key,
                str(log.path),
                rule=f"does not log {wanted}{near}",
                remedy="Choose a metric of all runs with --metric.",
            )
    return wanted


def compare_runs(pair: Pair, *, metric: str, limit_percent: float) -> Comparison:
    """Compare B with A, and each side with its repetition.

    Raises:
        UserError: two runs have no common step.
    """
    a, b = pair.a.columns, pair.b.columns
    repeated = (("A", pair.a, pair.repeat_a), ("B", pair.b, pair.repeat_b))
    return Comparison(
        metric=metric,
        limit_percent=limit_percent,
        deviation=_deviation(a[metric], b[metric], what=f"{metric} of A and B"),
        first_throughput=_first_throughput(a.get(THROUGHPUT, {}), b.get(THROUGHPUT, {})),
        steady_throughput=_steady_throughput(a.get(THROUGHPUT, {}), b.get(THROUGHPUT, {})),
        total_time=_total_time(a, b),
        noise={
            key: _deviation(
                log.columns[metric],
                repetition.columns[metric],
                what=f"{metric} of {key} and its repetition",
            )
            for key, log, repetition in repeated
            if repetition is not None
        },
    )


def _deviation(a: Column, b: Column, *, what: str) -> Deviation:
    steps = _common(a, b)
    if not steps:
        raise UserError(
            what,
            rule=f"have no common step ({_range(a)} and {_range(b)})",
            remedy="Compare runs that log the same steps.",
        )
    whole = [step for step in steps if math.isfinite(a[step]) and math.isfinite(b[step])]
    num_broken = len(steps) - len(whole)
    num_single = len(a.keys() ^ b.keys())
    if not whole:
        nan = math.nan
        return Deviation(tuple(steps), nan, nan, steps[0], nan, nan, num_broken, num_single)
    differences = {step: b[step] - a[step] for step in whole}
    error = statistics.fmean(map(abs, differences.values()))
    size = statistics.fmean(abs(a[step]) for step in whole)
    largest_step = max(whole, key=lambda step: abs(differences[step]))
    return Deviation(
        steps=tuple(steps),
        mean_absolute=error,
        largest=abs(differences[largest_step]),
        largest_step=largest_step,
        bias=statistics.fmean(differences.values()),
        relative=error / size if size else math.inf if error else 0.0,
        num_broken=num_broken,
        num_single=num_single,
        is_constant=len({a[step] for step in whole}) == 1,
    )


def _first_throughput(a: Column, b: Column) -> Ratio | None:
    means = [_mean([*column.values()][:FIRST_STEPS]) for column in (a, b)]
    return _ratio(means[0], means[1], b_over_a=True)


def _steady_throughput(a: Column, b: Column) -> Ratio | None:
    late = set([*a][FIRST_STEPS:]) & set([*b][FIRST_STEPS:])
    if not late:
        return None
    middles = [statistics.median(column[step] for step in late) for column in (a, b)]
    return _ratio(middles[0], middles[1], b_over_a=True)


def _total_time(a: Mapping[str, Column], b: Mapping[str, Column]) -> Ratio | None:
    name = next((name for name in STEP_SECONDS if name in a and name in b), None)
    steps = _common(a[name], b[name]) if name else []
    if name is None or not steps:
        return None
    return _ratio(
        sum(a[name][step] for step in steps), sum(b[name][step] for step in steps), b_over_a=False
    )


def _ratio(a: float, b: float, *, b_over_a: bool) -> Ratio | None:
    above, below = (b, a) if b_over_a else (a, b)
    return Ratio(a, b, above / below) if below > 0 and math.isfinite(above / below) else None


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _common(a: Column, b: Column) -> list[int]:
    return [step for step in a if step in b]


def _range(column: Column) -> str:
    steps = list(column)
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
