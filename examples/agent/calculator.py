# SPDX-License-Identifier: Apache-2.0
"""An agent that solves word problems with a calculator, written with OpenAI's client alone.

``solve`` is the agent that `examples/agent/agents.yaml` names. Nothing in it knows of tandem.
"""

from __future__ import annotations

import json
import operator
import re
from functools import cache
from typing import Any

from openai import AsyncOpenAI

MAX_TURNS = 4
_EXPRESSION = re.compile(r"(\d{1,6})([-+*])(\d{1,6})")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Calculate the value of an expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Two numbers with one of + - * between them.",
                    }
                },
                "required": ["expression"],
            },
        },
    }
]


async def solve(task: Any, endpoint: Any) -> None:
    """Answer a problem in turns; the reward function of the run scores what the policy wrote."""
    # Clients share connections: a new one for each episode would load certificates each time.
    client = _client(endpoint.base_url).with_options(api_key=endpoint.api_key)
    messages: list[Any] = [dict(message) for message in task.messages]
    for _ in range(MAX_TURNS):
        answer = await client.chat.completions.create(
            model=endpoint.model, messages=messages, tools=TOOLS
        )
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            if call.type != "function":
                continue
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not said.tool_calls:
            return


def calculate(arguments: str) -> str:
    """Return the value of the expression in the arguments of a call, or what is wrong with it."""
    match = _EXPRESSION.fullmatch(str(json.loads(arguments).get("expression")))
    if match is None:
        return "error: expected two numbers and one of + - *"
    return str(_OPERATIONS[match[2]](int(match[1]), int(match[3])))


@cache
def _client(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="of each episode")
