# SPDX-License-Identifier: Apache-2.0
"""Pictures, by matplotlib where it is installed: what all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import UserError

BLUE, ORANGE, GRAY = "#2563c9", "#d9690c", "#5d6877"


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
