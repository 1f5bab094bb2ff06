# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers as a command that tandem trains (docs/own_agent.md).

It runs in the interpreter that has verifiers and needs nothing of tandem. It plays many episodes at
the same time: a line of standard input asks for one, and a line of standard output answers. The
harness of the taskset asks the endpoint for turns, and the reward is the task's. A task that ends
with an error fails its episode. ``--rows FILE`` writes the rows of a data set instead, one for each
task.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import traceback
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
    """Play the episodes that standard input asks for, or write rows."""
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
    requests, answers_fd = os.fdopen(os.dup(0), "rb", buffering=0), os.dup(1)
    # Prints of the taskset are no answers, and its programs read no requests.
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Harnesses start uv, which may be installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    player = Player(taskset, options.harness, runtime=options.runtime, answers_fd=answers_fd)
    asyncio.run(player.serve(requests))


def row_of(task: Any, agent: str) -> dict[str, Any]:
    """Return the row of a task. Its prompt is the task's, whose tokens the harness decides."""
    prompt = task.data.prompt
    messages = [{"role": "user", "content": prompt if isinstance(prompt, str) else str(prompt)}]
    extra_info = {"task": task.data.idx}
    return {"prompt": messages, "agent_name": agent, "extra_info": extra_info}


class Player:
    """The episodes that are being played.

    Args:
        harness, runtime: the names that verifiers has for them.
        answers_fd: the descriptor that answers are written to.
    """

    def __init__(self, taskset: Any, harness: str, *, runtime: str, answers_fd: int) -> None:
        self._taskset, self._harness, self._runtime = taskset, harness, runtime
        self._answers_fd = answers_fd
        self._playing: dict[str, asyncio.Future[dict[str, float]]] = {}

    async def serve(self, requests: Any) -> None:
        """Begin and stop episodes as the lines of a pipe say, until it ends."""
        reader = asyncio.StreamReader(limit=1 << 30)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, requests)
        async with asyncio.TaskGroup() as tasks:
            while line := await reader.readline():
                request = json.loads(line)
                if not request.get("stop"):
                    tasks.create_task(self._answer(request))
                    await asyncio.sleep(0)  # it has begun when it is stopped
                elif request["episode"] in self._playing:
                    self._playing[request["episode"]].cancel()
            for playing in self._playing.values():
                playing.cancel()

    async def _answer(self, request: dict[str, Any]) -> None:
        """Play an episode, and write its reward and metrics, or why it failed."""
        number = request["episode"]
        playing = self._playing[number] = asyncio.ensure_future(self._play(request))
        await asyncio.wait((playing,))  # an error of one task does not end the others
        del self._playing[number]
        answer: dict[str, Any] = {"episode": number}
        if playing.cancelled():
            answer["failure"] = "stopped"
        elif (error := playing.exception()) is not None:
            answer["failure"] = "".join(traceback.format_exception(error))
        else:
            answer["returned"] = playing.result()
        write(self._answers_fd, b"\n" + json.dumps(answer).encode() + b"\n")

    async def _play(self, request: dict[str, Any]) -> dict[str, float]:
        """Let the harness play a task; return its reward and metrics."""
        (task,) = self._taskset.include(idx=[request["task"]["extra_info"]["task"]])
        # verifiers reads keys from variables; it keeps those with this word from harnesses.
        variable = f"EPISODE_API_KEY_{request['episode']}"
        os.environ[variable] = request["api_key"]
        try:
            config = AgentConfig(
                harness={"id": self._harness},
                runtime={"type": self._runtime},
                model=request["model"],
                client=EvalClientConfig(base_url=request["base_url"], api_key_var=variable),
            )
            async with make_agent(config) as agent:
                trace = await agent.run(task)
        finally:
            del os.environ[variable]
        if not trace.ok:
            cause = trace.errors[-1].message if trace.errors else "the task did not end well"
            raise RuntimeError(cause)
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return {**metrics, "reward": trace.reward}


def write(descriptor: int, data: bytes) -> None:
    """Write all of ``data``."""
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
