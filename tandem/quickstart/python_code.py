# SPDX-License-Identifier: Apache-2.0
"""The word problems of the calculator, with Python instead: programs of the model run in a jail.

Demonstrations call ``code_interpreter`` with one line, such as ``print(47*86)``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tandem.quickstart.calculator import (
    GRPO_KEYS,
    SFT_KEYS,
    TURNS,
    WRITERS,
    calls_twice,
    draw_product,
    messages_of,
)
from tandem.quickstart.task import Task, ToolUse

_HERE = Path(__file__).parent


def call_python(expression: str) -> dict[str, Any]:
    """Return the call that prints the value of an expression."""
    return {"name": "code_interpreter", "arguments": {"code": f"print({expression})"}}


PYTHON = Task(
    "word problems with Python",
    draw_product,
    calls_twice,
    WRITERS,
    ToolUse(
        partial(messages_of, call=call_python),
        tool_keys=(f"{TURNS}.tool_config_path={_HERE / 'code_interpreter.yaml'}",),
        broken_keys=(
            f"{TURNS}.tool_config_path=null",
            f"{TURNS}.function_tool_path={_HERE / 'broken_tool.py'}",
        ),
        sft_keys=SFT_KEYS,
        grpo_keys=GRPO_KEYS,
    ),
)
