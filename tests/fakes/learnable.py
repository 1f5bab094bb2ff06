# SPDX-License-Identifier: Apache-2.0
"""A reward with a known optimum, 1: every character of the response is a 7."""

from collections.abc import Mapping
from typing import Any


def sevens(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """The share of sevens."""
    return solution_str.count("7") / max(len(solution_str), 1)
