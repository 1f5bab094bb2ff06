# SPDX-License-Identifier: Apache-2.0
"""Pictures, by matplotlib where it is installed: what all of them share, and the learning curve for
a README (reward and validation accuracy over steps)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.metrics.run_folder import RunData, read_run
from tandem.metrics.series import validation_names

_REWARD = "critic/score/mean"
_WINDOW = 9
BLUE, ORANGE, GRAY = "#2563c9", "#d9690c", "#5d6877"


def plot_png(run_folder: Path, output: Path) -> Path:
    """Draw the curves of a run and return ``output``.

    Raises:
        UserError: matplotlib is not installed, or the folder holds no run or neither of the curves.
    """
    run = read_run(run_folder)
    if _REWARD not in run.columns and not validation_names(run.columns):
        raise UserError(
            f"RUN={str(run_folder)!r}: has no reward and no validation. Give a run with either."
        )
    return write_png(lambda panels: _draw(panels[0], run), output)


def write_png(draw: Callable[[Sequence[Any]], None], output: Path, *, num_panels: int = 1) -> Path:
    """Let ``draw`` fill matplotlib's axes, one a panel from top to bottom; returns ``output``.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UserError(
            f"--plot={str(output)!r}: the package matplotlib is not installed. "
            "Install it (pip install matplotlib)."
        ) from error
    figure = Figure(figsize=(8, 1.2 + 2.4 * num_panels), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    draw(list(figure.subplots(num_panels, squeeze=False)[:, 0]))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    except (OSError, ValueError) as error:  # a ValueError names the formats there are
        raise UserError(
            f"--plot={str(output)!r}: cannot be written ({error}). Give another file."
        ) from error
    return output


def style_panel(axes: Any) -> None:
    """The look of all our pictures."""
    axes.grid(axis="y", color="#e3e7ec", linewidth=0.8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#c9d0d8")
    axes.tick_params(colors=GRAY, length=0)


def _draw(axes, run: RunData) -> None:
    if _REWARD in run.columns:
        steps = [step for step, _ in run.columns[_REWARD]]
        values = [value for _, value in run.columns[_REWARD]]
        axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=1)
        axes.plot(steps, _smooth(values), color=BLUE, linewidth=2, label="training reward")
    for name in validation_names(run.columns)[:1]:
        steps = [step for step, _ in run.columns[name]]
        values = [value for _, value in run.columns[name]]
        style = {"color": ORANGE, "marker": "o", "markersize": 4, "linewidth": 2}
        axes.plot(steps, values, **style, label="held-out accuracy")
    axes.set_xlabel("training step", color=GRAY)
    axes.set_ylim(0, 1 if axes.get_ylim()[1] <= 1.1 else None)
    axes.set_xlim(0, run.num_steps)
    style_panel(axes)
    axes.legend(frameon=False, loc="lower right")


def _smooth(values: list[float]) -> list[float]:
    """Centred moving average, narrower at the ends."""
    half = _WINDOW // 2
    return [
        statistics.fmean(values[max(0, index - half) : index + half + 1])
        for index in range(len(values))
    ]
