# SPDX-License-Identifier: Apache-2.0
"""The calculator of the quickstart: an example of a file for ``multi_turn.function_tool_path``."""

from __future__ import annotations

import operator
import re

from tandem.agents.verl_names import function_tool

_EXPRESSION = re.compile(r"(\d{1,6})([-+*])(\d{1,6})")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@function_tool
def calculator(expression: str) -> str:
    """Calculate the value of an expression.

    Args:
        expression: Two numbers with one of + - * between them.
    """
    match = _EXPRESSION.fullmatch(expression)
    if match is None:
        return "error: expected two numbers and one of + - *"
    return str(_OPERATIONS[match[2]](int(match[1]), int(match[3])))
