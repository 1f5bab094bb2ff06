# SPDX-License-Identifier: Apache-2.0
"""The overhead of a request to the endpoint of agents under many sessions at once.

    PYTHONPATH=. python benchmarks/endpoint.py [--sessions 200] [--tokens 2000] [--turns 4]

Each session is a conversation that begins with a history of that many tokens and grows by turns of
64 tokens. The turns are given and take a fixed time, so that what a request takes beyond it is the
endpoint's: HTTP, the match of the history, the chat template, the tokenizer. The clients are one
other process. It prints milliseconds: processor time of the endpoint's process for a request, and
time on the clock beyond that of the turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure import describe, tell

from tandem.agents.endpoint import open_endpoint
from tandem.data.call_formats import CALL_FORMATS
from tandem.data.tokenizer import TextCodec
from tandem.pipeline.conversing import Conversing, TurnLimits
from tandem.pipeline.sessions import ProgramSession
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams
from tests.fakes.made_tokenizers import codec_for

TURN_TOKENS = 64
CLIENTS = "clients"


class TimedPolicy:
    """A policy whose turns are given, and take a fixed time."""

    version = 0

    def __init__(self, codec: TextCodec, *, draw_s: float) -> None:
        words = codec.encode(["the answer is 42 because " * TURN_TOKENS])[0]
        self._ids = array("i", [*words[: TURN_TOKENS - 1], codec.eos_ids[0]])
        self._draw_s = draw_s

    def submit_apart(self, request: GenerationRequest) -> list[asyncio.Future[Any]]:
        """Begin a turn; see ``RolloutLoop``."""
        (sample_id,) = request.sample_ids
        log_probs = array("f", [-0.5] * len(self._ids))
        turn = Completion(sample_id, self._ids, log_probs, FinishReason.STOP, self.version)

        async def draw() -> tuple[Completion, ...]:
            await asyncio.sleep(self._draw_s)
            return (turn,)

        return [asyncio.ensure_future(draw())]

    async def forget(self, sample_ids: Sequence[int]) -> None:
        """Do nothing."""


def main() -> None:
    """Measure, print, and write the result to ``--output``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--draw-s", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    measured = asyncio.run(measure(options))
    result = {
        "benchmark": "endpoint",
        **describe(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "load": os.getloadavg()[0],
        **measured,
    }
    tell(result, options.output)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the requests of all sessions take."""
    codec = codec_for("qwen2_5")
    policy: Any = TimedPolicy(codec, draw_s=options.draw_s)
    no_pool: Any = None
    conversing = Conversing(
        codec,
        no_pool,
        CALL_FORMATS["hermes"],
        {},
        TurnLimits(None, None, 600.0),
        max_prompt_tokens=2 * options.tokens,
    )
    sampling = SamplingParams(1.0, 1.0, -1, 100 * TURN_TOKENS)
    named: list[str] = []
    async with open_endpoint(("127.0.0.1", 0), name_once=named.append) as endpoint:
        accesses = [
            endpoint.admit(
                ProgramSession(
                    GenerationRequest((sample,), (1, 2), sampling),
                    conversing=conversing,
                    rollout=policy,
                )
            )
            for sample in range(options.sessions)
        ]
        text = _history(codec, options.tokens)
        keys = [access.api_key for access in accesses]
        job = {"url": accesses[0].base_url, "keys": keys, "text": text, **_numbers(options)}
        begin_s = time.process_time()
        clients = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, CLIENTS),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await clients.communicate(json.dumps(job).encode())
        cpu_s = time.process_time() - begin_s
    seconds: list[float] = json.loads(output)
    num_requests = options.sessions * options.turns
    assert len(seconds) == num_requests, "each request was answered"
    return {
        **_numbers(options),
        "sessions": options.sessions,
        "history_tokens": options.tokens,
        "requests": num_requests,
        "cpu_ms_per_request": round(1000 * cpu_s / num_requests, 2),
        "wall_ms_beyond_the_turn": _summary([one - options.draw_s for one in seconds]),
    }


def _numbers(options: argparse.Namespace) -> dict[str, Any]:
    return {"turns": options.turns, "draw_s": options.draw_s}


def _history(codec: TextCodec, num_tokens: int) -> str:
    """Return a text of about ``num_tokens`` tokens."""
    words = "There are 47 boxes with 86 apples in each, and Mia takes 39 of them out. "
    return words * (num_tokens // len(codec.encode([words])[0]))


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    return {
        "median": round(statistics.median(ordered), 2),
        "lowest": round(ordered[0], 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


async def run_clients(job: dict[str, Any]) -> list[float]:
    """Play all sessions, begun evenly within the time of a turn; return each request's seconds."""
    host, _, port = job["url"].removeprefix("http://").removesuffix("/v1").partition(":")
    seconds: list[float] = []

    async def converse(number: int, key: str) -> None:
        await asyncio.sleep(number * job["draw_s"] / len(job["keys"]))
        reader, writer = await asyncio.open_connection(host, int(port))
        messages: list[Any] = [{"role": "user", "content": job["text"]}]
        for _ in range(job["turns"]):
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            begin_s = time.perf_counter()
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
                f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split()[0])
            answer = json.loads(await reader.readexactly(size))
            seconds.append(time.perf_counter() - begin_s)
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "Go on."})
        writer.close()

    async with asyncio.TaskGroup() as group:
        for number, key in enumerate(job["keys"]):
            group.create_task(converse(number, key))
    return seconds


if __name__ == "__main__":
    if sys.argv[1:] == [CLIENTS]:
        sys.stdout.write(json.dumps(asyncio.run(run_clients(json.load(sys.stdin)))))
    else:
        main()
