# SPDX-License-Identifier: Apache-2.0
"""Plots by matplotlib, an optional package."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.report.compare import Comparison, Pair

BLUE, ORANGE, GRAY = "#2563c9", "#d9690c", "#5d6877"
_LINE = {"linewidth": 1.6}
_REPETITION = {"linewidth": 1, "linestyle": ":"}


def plot_comparison(pair: Pair, comparison: Comparison, *, output: Path) -> Path:
    """Draw both series, and their difference with its limit; return ``output``.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """

    def draw(panels: Sequence[Any]) -> None:
        _draw_series(panels[0], pair, comparison=comparison)
        _draw_differences(panels[1], pair, comparison=comparison)

    return write_png(draw, output, num_panels=2)


def _draw_series(axes: Any, pair: Pair, *, comparison: Comparison) -> None:
    sides = (
        ("A", pair.a, {"color": BLUE, **_LINE}),
        ("B", pair.b, {"color": ORANGE, **_LINE}),
        ("A again", pair.repeat_a, {"color": BLUE, **_REPETITION}),
        ("B again", pair.repeat_b, {"color": ORANGE, **_REPETITION}),
    )
    for label, log, style in sides:
        if log is not None:
            column = log.columns[comparison.metric]
            axes.plot(list(column), list(column.values()), label=label, **style)
    axes.set_ylabel(comparison.metric, color=GRAY)
    _finish(axes, comparison.deviation.steps)


def _draw_differences(axes: Any, pair: Pair, *, comparison: Comparison) -> None:
    """Draw percentages, with the mean error and its limit on the same scale."""
    deviation = comparison.deviation
    steps = deviation.steps
    a, b = (log.columns[comparison.metric] for log in (pair.a, pair.b))
    differences = [100 * (b[step] - a[step]) for step in steps]
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.plot(steps, differences, color=GRAY, alpha=0.6, linewidth=1, label="B - A")
    means = _running_means(dict(zip(steps, differences, strict=True)))
    axes.plot(list(means), list(means.values()), color=BLUE, label="mean error so far", **_LINE)
    axes.axhline(comparison.limit_percent, color=ORANGE, linestyle="--", label="limit of the mean")
    if comparison.noise_floor is not None:
        floor = 100 * comparison.noise_floor
        axes.axhline(floor, color=GRAY, linestyle=":", label="noise floor")
    axes.set_ylabel("difference, %", color=GRAY)
    axes.set_xlabel("training step", color=GRAY)
    _finish(axes, steps)


def _running_means(differences: Mapping[int, float]) -> dict[int, float]:
    """Return the mean absolute difference up to each step, of finite values only."""
    sizes: list[float] = []
    means: dict[int, float] = {}
    for step, difference in differences.items():
        if abs(difference) < float("inf"):
            sizes.append(abs(difference))
        if sizes:
            means[step] = statistics.fmean(sizes)
    return means


def _finish(axes: Any, steps: Sequence[int]) -> None:
    axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
    style_panel(axes)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def write_png(draw: Callable[[Sequence[Any]], None], output: Path, *, num_panels: int = 1) -> Path:
    """Call ``draw`` with the axes of the panels, from top to bottom; return ``output``.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            "--plot",
            str(output),
            rule="the package matplotlib is not installed",
            remedy="Install it (pip install matplotlib).",
        ) from error
    figure = Figure(figsize=(8, 1.2 + 2.4 * num_panels), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    draw(list(figure.subplots(num_panels, squeeze=False)[:, 0]))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except (OSError, ValueError) as error:  # a ValueError lists the supported formats
        raise UserError(
            "--plot", str(output), rule=f"cannot be written ({error})", remedy="Give another file."
        ) from error
    return output


def style_panel(axes: Any) -> None:
    """Apply the common style of all plots."""
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9d0d8")
    axes.tick_params(colors=GRAY, length=0)
