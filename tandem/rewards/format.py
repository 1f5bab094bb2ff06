# SPDX-License-Identifier: Apache-2.0
"""Whether a response keeps a format: a regular expression over the whole response.

The default asks for ``<think>...</think><answer>...</answer>``, each tag once. Says nothing about
correctness.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

THINK_ANSWER = (
    r"\s*<think>(?:(?!</?think>|</?answer>).)*</think>"
    r"\s*<answer>(?:(?!</?think>|</?answer>).)*</answer>\s*"
)


def keeps_format(text: str, pattern: str) -> bool:
    """Whether ``pattern`` matches the whole of ``text``; ``.`` matches line ends too."""
    return _compiled(pattern).fullmatch(text) is not None


def compute_score(
    data_source: str,
    solution_str: str,
    *,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    pattern: str = THINK_ANSWER,
) -> float:
    """1 if the response keeps the format, else 0."""
    return float(keeps_format(solution_str, pattern))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
