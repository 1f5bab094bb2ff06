# SPDX-License-Identifier: Apache-2.0
"""Reward functions with verl's signature for test runs, named by ``custom_reward_function.name``.

All are pure functions of the response, so that a run and its resumed twin see the same scores.
"""

import time
import zlib
from collections.abc import Mapping
from typing import Any

HANG_S = 60.0


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


def graded(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """0, 0.25, 0.5, 0.75 or 1 by a checksum of the response."""
    return _checksum(solution_str) % 5 / 4


def rarely_right(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """1 for one response in six, so that many small groups fare alike."""
    right = _checksum(solution_str) % 6 == 0
    return {"score": float(right), "acc": right}


def constant(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """The same for everybody."""
    return 1.0


def unreliable(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """1, but an eighth hangs, an eighth raises and an eighth is not a number.

    The ground truth passes, so that the trial before the start does.
    """
    kind = 7 if solution_str == ground_truth else _checksum(solution_str) % 8
    if kind == 0:
        time.sleep(HANG_S)
    if kind == 1:
        raise RuntimeError("this reward is out of order")
    return float("nan") if kind == 2 else 1.0


def broken(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Raises for every response but the ground truth, so that the trial before the start passes."""
    if solution_str == ground_truth:
        return 1.0
    raise RuntimeError("this reward is out of order")


def slow(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Not done in time, except for the ground truth, so that the trial before the start passes."""
    if solution_str == ground_truth:
        return 1.0
    time.sleep(HANG_S)
    return 1.0
