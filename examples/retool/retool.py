# SPDX-License-Identifier: Apache-2.0
"""ReTool: the rows and the reward of verl's recipe, on the files as the hub has them.

``Conversations`` reads JoeYing/ReTool-SFT for fine-tuning. ``Problems`` reads
BytedTsinghua-SIA/DAPO-Math-17k, Maxwell-Jia/AIME_2024 and yentinglin/aime_2025. No preprocessing
is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.agents.code_tool import SCHEMA
from tandem.data.files import read_rows
from tandem.errors import UserError
from tandem.rewards.math_answer import compute_boxed_score

ANSWER_FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
QUESTION = "*user question:*"
PARTS = re.compile(r"(.*?)<(code|interpreter|answer)>(.*?)</\2>", re.DOTALL)
BLOCK = re.compile(r"```python(.*?)```", re.DOTALL)
TOOLS = [SCHEMA]
"""The schema of ``code_interpreter.yaml``, which the chat template shows."""


class Conversations:
    """The conversations of ReTool-SFT, with calls of ``code_interpreter`` and their results."""

    def __init__(self, data_files: Sequence[str], config: object) -> None:
        self._files = data_files

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, row in enumerate(read_rows(self._files)):
            question, answer = (message["content"] for message in row["messages"][:2])
            yield {"messages": split_conversation(question, answer, row=number), "tools": TOOLS}


def split_conversation(question: str, answer: str, *, row: int) -> list[dict[str, Any]]:
    """Return a conversation as messages: ``<code>`` is a call, ``<interpreter>`` its result.

    Raises:
        UserError: the text has no question, or other parts.
    """
    text = question.partition(QUESTION)[2].replace("<answer>", "").replace("</answer>", "").strip()
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    for before, kind, inside in PARTS.findall(answer):
        said = before.strip()
        if kind == "code":
            call = {"name": "code_interpreter", "arguments": {"code": strip_block(inside)}}
            made = [{"type": "function", "function": call}]
            messages.append({"role": "assistant", "content": said, "tool_calls": made})
        elif kind == "interpreter":
            messages.append({"role": "tool", "content": inside.strip()})
        else:
            messages.append({"role": "assistant", "content": (before + inside).strip()})
    if not text or messages[-1]["role"] != "assistant":
        raise UserError(
            "data.train_files",
            row,
            rule=f"the row has no {QUESTION!r}, or no <answer>",
            remedy="Use the files of JoeYing/ReTool-SFT.",
        )
    return messages


def strip_block(code: str) -> str:
    """Return the text of the first block of Python, or else the whole text."""
    block = BLOCK.search(code)
    return block[1].strip() if block else code


class Problems:
    """The problems of the three data sets, answered with ``code_interpreter``."""

    def __init__(self, data_files: Sequence[str], config: object) -> None:
        self._files = data_files

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for path in self._files:
            # verl names a data set by its folder, such as aime_2025.
            name = Path(path).parent.name.lower()
            for index, row in enumerate(read_rows([path])):
                yield read_problem(row, name=name, index=index)


def read_problem(row: Mapping[str, Any], *, name: str, index: int) -> dict[str, Any]:
    """Return a row in verl's schema.

    Args:
        name: the data source of rows that do not name their own.
    """
    if "prompt" in row:
        text, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
    else:
        text = row["Problem"] if "Problem" in row else row["problem"]
        truth = row["Answer"] if "Answer" in row else row["answer"]
    return {
        "data_source": row.get("data_source", name),
        "prompt": [{"role": "user", "content": text + ANSWER_FORMAT}],
        "ability": "MATH",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "agent_name": "tool_agent",
        "extra_info": {"index": index},
    }


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, Any]:
    """Score 1 if the last box holds the right answer; else -1, and up to -0.6 for calls."""
    judged = compute_boxed_score(
        data_source, solution_str, ground_truth=ground_truth, extra_info=extra_info
    )
    score = 1.0
    if not judged["acc"]:
        score = min(-0.6, -1.0 + (extra_info["num_turns"] - 2) / 2 * 0.1)
    return {"score": score, "acc": judged["acc"], "pred": judged["pred"]}
