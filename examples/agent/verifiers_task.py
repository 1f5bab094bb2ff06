# SPDX-License-Identifier: Apache-2.0
"""A task of a taskset of verifiers as a command that tandem trains (docs/own_agent.md).

It runs in the interpreter that has verifiers and needs nothing of tandem. The harness of the
taskset asks the endpoint for turns, and the reward is the task's. A task that ends with an error
fails the episode. ``--rows FILE`` writes the rows of a data set instead, one for each task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from verifiers.v1.agent import make_agent  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import EvalClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    load_taskset,
    taskset_config_type,
)


def main() -> None:
    """Play the task that standard input names, or write rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("taskset", help="the id of an installed taskset")
    parser.add_argument("--agent", default="verifiers", help="the name of the agent in the rows")
    parser.add_argument("--harness", default="null")
    parser.add_argument("--runtime", default="subprocess")
    parser.add_argument("--rows", type=Path, help="write the rows of a data set to this file")
    options = parser.parse_args()
    taskset = load_taskset(taskset_config_type(options.taskset)(id=options.taskset))
    if options.rows is not None:
        rows = [json.dumps(row_of(task, options.agent)) for task in taskset]
        options.rows.write_text("\n".join(rows) + "\n")
        return
    row = json.load(sys.stdin)
    (task,) = taskset.include(idx=[row["extra_info"]["task"]])
    answers = os.dup(1)
    os.dup2(2, 1)  # prints of the taskset are no reward
    given = asyncio.run(play(task, harness=options.harness, runtime=options.runtime))
    os.write(answers, json.dumps(given).encode() + b"\n")


def row_of(task: Any, agent: str) -> dict[str, Any]:
    """Return the row of a task. Its prompt is the task's, whose tokens the harness decides."""
    prompt = task.data.prompt
    messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else str(prompt)}]
    extra_info = {"task": task.data.idx}
    return {"prompt": messages, "agent_name": agent, "extra_info": extra_info}


async def play(task: Any, *, harness: str, runtime: str) -> dict[str, float]:
    """Let the harness play a task; return its reward and metrics.

    Raises:
        SystemExit: the task ended with an error.
    """
    # Harnesses start uv, which may be installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    url = os.environ["OPENAI_BASE_URL"]
    config = AgentConfig(
        harness={"id": harness},
        runtime={"type": runtime},
        model="policy",
        client=EvalClientConfig(base_url=url, api_key_var="OPENAI_API_KEY"),
    )
    async with make_agent(config) as agent:
        trace = await agent.run(task)
    if not trace.ok:
        cause = trace.errors[-1].message if trace.errors else "the task did not end well"
        raise SystemExit(cause)
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, "reward": trace.reward}


if __name__ == "__main__":
    main()
