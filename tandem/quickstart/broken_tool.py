# SPDX-License-Identifier: Apache-2.0
"""A calculator that never calculates: the same model without its tool."""

from __future__ import annotations

from tandem.agents.verl_names import function_tool


@function_tool
def calculator(expression: str) -> str:
    """Answer nothing useful.

    Args:
        expression: Two numbers with one of + - * between them.
    """
    return "error: the calculator is broken"
