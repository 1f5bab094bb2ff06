# SPDX-License-Identifier: Apache-2.0
"""The word problems of the calculator, with Python instead: programs of the model run in a jail.

Demonstrations call ``code_interpreter`` with one line, such as ``print(47*86)``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tandem.quickstart.calculator import TURNS, WRITERS, calls_twice, draw_product, messages_of
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
        sft_keys=(
            "data.multiturn.enable=True",
            "data.max_length=192",
            "trainer.total_training_steps=400",
        ),
        grpo_keys=(
            "data.train_batch_size=16",
            "data.max_response_length=112",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            f"{TURNS}.enable=True",
            f"{TURNS}.max_assistant_turns=4",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            "trainer.total_training_steps=40",
        ),
    ),
)
