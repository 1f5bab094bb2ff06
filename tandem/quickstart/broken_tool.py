# SPDX-License-Identifier: Apache-2.0
"""Tools that never calculate: the same model without its calculator or interpreter."""

from __future__ import annotations

from tandem.agents.verl_names import function_tool


@function_tool
def calculator(expression: str) -> str:
    """Answer nothing useful.

    Args:
        expression: Two numbers with one of + - * between them.
    """
    return "error: the calculator is broken"


@function_tool
def code_interpreter(code: str) -> str:
    """Answer nothing useful.

    Args:
        code: A program.
    """
    return "error: the interpreter is broken"
