# SPDX-License-Identifier: Apache-2.0
"""The division of devices by ratios, and the text of values of ``trainer.separated_node_*``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

ROUNDING = 1e-9


def share_devices(ratios: Sequence[float], num_devices: int) -> tuple[int, ...]:
    """Return whole devices by largest remainder; their sum is ``floor(sum(ratios) * num_devices)``.

    Example:
        >>> share_devices((0.5, 0.25, 0.25), 8)
        (4, 2, 2)
    """
    exact = [ratio * num_devices for ratio in ratios]
    shares = [math.floor(value + ROUNDING) for value in exact]
    left = math.floor(sum(exact) + ROUNDING) - sum(shares)
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[:left]:
        shares[index] += 1
    return tuple(shares)


def show_groups(groups: Iterable[Sequence[str]]) -> str:
    """Return groups of tasks as a value of ``trainer.separated_node_tasks``."""
    return f"[{','.join(f'[{names}]' for names in map(','.join, groups))}]"


def show_shares(ratios: Sequence[float]) -> str:
    """Return a value of ``trainer.separated_node_ratios``: ``ratios`` scaled to the sum 1, in
    hundredths. If a share would be 0, all shares are equal.

    Example:
        >>> show_shares((0.5, 0.5, 1.0))
        '[0.25,0.25,0.5]'
    """
    total = sum(ratios)
    shares = share_devices([ratio / total for ratio in ratios], 100)
    if 0 in shares:
        shares = share_devices([1 / len(ratios)] * len(ratios), 100)
    return f"[{','.join(f'{share / 100:g}' for share in shares)}]"
