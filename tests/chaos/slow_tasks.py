# SPDX-License-Identifier: Apache-2.0
"""The reward and the tool of the chaos job, which take their time so that a signal may meet them.

The delays differ from call to call, and results do not depend on them.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Mapping
from typing import Any

from tandem.agents.verl_names import function_tool

MAX_REWARD_S = 0.04
MAX_CALL_S = 0.3
_delays = random.Random()


def graded(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Return 0, 0.25, 0.5, 0.75 or 1 by a checksum of the response."""
    time.sleep(_delays.uniform(0, MAX_REWARD_S))
    return zlib.crc32(solution_str.encode()) % 5 / 4


@function_tool
def calculator(expression: str) -> str:
    """Calculate the value of an expression.

    Args:
        expression: Two numbers with one of + - * between them.
    """
    time.sleep(_delays.uniform(0, MAX_CALL_S))
    number = zlib.crc32(expression.encode()) % 8
    if number == 0:
        raise ValueError("this tool is out of order")
    return str(number)
