# SPDX-License-Identifier: Apache-2.0
"""Short texts of numbers: at most four significant digits, with the suffixes k, M and G."""

from __future__ import annotations

import math

_SUFFIXES = ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""The minimum, the divisor and the suffix of each range."""


def format_number(value: float) -> str:
    """Format a number as a short text.

    Example:
        >>> [format_number(value) for value in (0.51234, 25.0, 128340.0, 3e-7)]
        ['0.512', '25', '128k', '3e-07']
    """
    if not math.isfinite(value):
        return str(value)
    for size, divisor, suffix in _SUFFIXES:
        if abs(value) >= size:
            return f"{_round(value / divisor):g}{suffix}"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{_round(value):g}"


def format_duration(seconds: float) -> str:
    """Format as hours and minutes, minutes and seconds, or seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _round(value: float) -> float:
    return float(f"{value:.3g}")
