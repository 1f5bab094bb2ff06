# SPDX-License-Identifier: Apache-2.0
"""``tandem compare A B``: compare two runs of one recipe, for example on two kinds of device.

Exit code 0 if the mean absolute error of their rewards or losses is within the limit, 1 if not, 2
if they cannot be compared or if agreement shows nothing since A is constant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from tandem.cli.printing import TableConsole
from tandem.errors import UserError
from tandem.metrics.number_format import format_duration, format_number
from tandem.report.compare import (
    FIRST_STEPS,
    LIMITS_PERCENT,
    Comparison,
    Deviation,
    Pair,
    Ratio,
    choose_metric,
    compare_runs,
)
from tandem.report.compare_sources import MetricLog, read_metrics
from tandem.report.plot import plot_comparison

AGREE, DIFFER, CANNOT_TELL = 0, 1, 2

_Row = tuple[str, str, str, str, str]
"""The name of a measurement, its values in A and in B, the result, and a note."""


def run(arguments: Sequence[str]) -> int:
    """Print the table and the verdict. Raise UserError if the runs cannot be compared."""
    options = _parser().parse_args(arguments)
    pair = Pair(
        a=read_metrics(options.a, key="A"),
        b=read_metrics(options.b, key="B"),
        repeat_a=_repetition(options.repeat_a, key="--repeat-a"),
        repeat_b=_repetition(options.repeat_b, key="--repeat-b"),
    )
    metric = choose_metric(pair, options.metric)
    limit_percent = _limit(metric, options.limit)
    comparison = compare_runs(pair, metric=metric, limit_percent=limit_percent)
    console = TableConsole(highlight=False)
    for key, log in (("A", pair.a), ("B", pair.b)):
        print(f"{key}  {log.path}")
    console.print(_table(comparison))
    console.print(_verdict(comparison))
    if options.plot:
        print(plot_comparison(pair, comparison, output=options.plot))
    return _exit_code(comparison)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem compare",
        description="Compare two runs of one recipe. A run is its folder, or what it logged: "
        "metrics.jsonl, TensorBoard's events, or a console log (ours or verl's).",
    )
    parser.add_argument("a", metavar="A", type=Path, help="the run to compare with")
    parser.add_argument("b", metavar="B", type=Path, help="the run that is compared")
    for side in ("a", "b"):
        parser.add_argument(
            f"--repeat-{side}",
            metavar="RUN",
            type=Path,
            help=f"a repetition of {side.upper()}: shows how much equal runs differ",
        )
    published = ", ".join(f"{name} {limit:g}" for name, limit in LIMITS_PERCENT.items())
    parser.add_argument("--metric", metavar="NAME", help=f"default: the first in both: {published}")
    parser.add_argument(
        "--limit", metavar="PERCENT", type=float, help="limit of the mean absolute error"
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw a picture (PNG, SVG, PDF)")
    return parser


def _repetition(path: Path | None, *, key: str) -> MetricLog | None:
    return None if path is None else read_metrics(path, key=key)


def _limit(metric: str, wanted: float | None) -> float:
    if wanted is None and metric not in LIMITS_PERCENT:
        raise UserError(
            "--metric",
            metric,
            rule="has no published limit",
            remedy="Set --limit=PERCENT.",
        )
    limit_percent = LIMITS_PERCENT[metric] if wanted is None else wanted
    if not 0 <= limit_percent < math.inf:
        raise UserError(
            "--limit", limit_percent, rule="must be a number from 0 on", remedy="Set it in percent."
        )
    return limit_percent


def _table(comparison: Comparison) -> Table:
    steps = comparison.deviation.steps
    title = f"{comparison.metric}, {len(steps)} common steps ({steps[0]} to {steps[-1]})"
    table = Table(title=escape(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("", "A", "B", "result"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("")
    for row in _rows(comparison):
        table.add_row(*row)
    return table


def _rows(comparison: Comparison) -> Iterator[_Row]:
    deviation = comparison.deviation
    limit = f"limit {comparison.limit_percent:g} %"
    yield "mean absolute error", "", "", _percent(deviation.mean_absolute), limit
    yield "largest error", "", "", _percent(deviation.largest), f"at step {deviation.largest_step}"
    yield "bias", "", "", _percent(deviation.bias, sign="+"), "mean of B - A"
    yield "relative error", "", "", _percent(deviation.relative), "of the mean of |A|"
    for side, noise in comparison.noise.items():
        yield _noise_row(side, noise, deviation=deviation)
    if deviation.num_broken:
        yield "steps not finite", "", "", str(deviation.num_broken), "left out above"
    if deviation.num_single:
        yield "steps of one run only", "", "", str(deviation.num_single), "left out above"
    first, later = comparison.first_throughput, comparison.steady_throughput
    yield _ratio_row(f"throughput, first {FIRST_STEPS}", first, note="B / A", written=format_number)
    yield _ratio_row("throughput, later", later, note="B / A, medians", written=format_number)
    time = comparison.total_time
    yield _ratio_row("total time of steps", time, note="A / B", written=format_duration)


def _noise_row(side: str, noise: Deviation, *, deviation: Deviation) -> _Row:
    floor = noise.mean_absolute
    note = f"error is {deviation.mean_absolute / floor:.1f} x this" if floor else ""
    return f"noise, {side} again", "", "", _percent(floor), note


def _ratio_row(
    label: str, ratio: Ratio | None, *, note: str, written: Callable[[float], str]
) -> _Row:
    if ratio is None:
        return label, "", "", "-", "not in both logs"
    return label, written(ratio.a), written(ratio.b), f"{ratio.value:.3f}", note


def _exit_code(comparison: Comparison) -> int:
    if not comparison.is_within_limit:
        return DIFFER
    return CANNOT_TELL if comparison.deviation.is_constant else AGREE


def _verdict(comparison: Comparison) -> str:
    code = _exit_code(comparison)
    if code == CANNOT_TELL:
        return "[yellow]Cannot tell: A is constant[/], and B is within the limit of it."
    if code == AGREE:
        return "[green]The runs agree[/]: the mean absolute error is within the limit."
    if comparison.deviation.num_broken:
        return "[red]The runs differ[/]: at some steps A or B is not finite."
    return "[red]The runs differ[/]: the mean absolute error exceeds the limit."


def _percent(share: float, *, sign: str = "") -> str:
    return f"{100 * share:{sign}.4g} %"
