# SPDX-License-Identifier: Apache-2.0
"""Commands that play many episodes: what one episode does is not felt by the others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents import shared_commands
from tandem.agents.programs import Programs
from tandem.agents.setup import Access, ProgramEnd, ProgramSpec, Task
from tandem.children.command import MAX_LINE_BYTES

ACCESS = Access("http://127.0.0.1:9/v1", "key", "policy")
LONG_S = 60.0
"""Far longer than an episode takes on a busy machine."""
PLAYING = """
import json, os, signal, subprocess, sys, threading, time

stopped = {}
lock = threading.Lock()


def answer(number, **fields):
    with lock:
        print("\\n" + json.dumps({"episode": number, **fields}), flush=True)


def play(message):
    number, kind = message["episode"], message["task"]["extra_info"]["kind"]
    assert message["api_key"] == "key" and message["base_url"].startswith("http")
    if kind == "fine":
        answer(number, returned={"reward": 1.0, "pid": os.getpid()})
    if kind == "fails":
        answer(number, failure="Traceback:\\n  the whole text\\nKeyError: 'x'\\n")
    if kind == "prints":
        with lock:
            print("x" * LENGTH + "\\n[1]\\n{}\\nnull\\n" + "[" * 100000 + "\\nhalf a line", end="")
        answer(number, returned=0.5)
    if kind == "forges":
        answer("other", returned=7)
        answer(number, returned=0.25)
        answer(number, returned=7)
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raises":
        print("ValueError: broken", file=sys.stderr, flush=True)
        os._exit(3)
    if kind == "waits":
        stopped[number].wait()
        answer(number, failure="stopped")
    if kind == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
            start_new_session=True)
        answer(number, returned=1.0)


for line in sys.stdin:
    message = json.loads(line)
    if message.get("stop"):
        stopped[message["episode"]].set()
        continue
    stopped[message["episode"]] = threading.Event()
    threading.Thread(target=play, args=(message,), daemon=True).start()
""".replace("LENGTH", str(MAX_LINE_BYTES + 1))


def task_of(kind: str) -> Task:
    return Task((), "", {"kind": kind}, seed=7, episode_id=(7, 0), tools=())


def spec_of(folder: Path, num_processes: int = 1) -> ProgramSpec:
    (folder / "playing.py").write_text(PLAYING)
    argv = (sys.executable, str(folder / "playing.py"))
    return ProgramSpec("mine", argv=argv, num_processes=num_processes)


def playing(
    spec: ProgramSpec, folder: Path, body: Callable[[Callable[[str], Any]], Awaitable[Any]]
) -> Any:
    """Run ``body`` with a function that plays an episode of a kind, and close the processes."""

    async def main() -> Any:
        no_pool: Any = None
        environment, log = dict(os.environ), folder / "log"
        programs = Programs({"mine": spec}, pool=no_pool, environment=environment, log=log)
        try:
            async with asyncio.timeout(LONG_S):
                return await body(lambda kind: programs.run("mine", task_of(kind), access=ACCESS))
        finally:
            await programs.close()

    before = children()
    try:
        return asyncio.run(main())
    finally:
        assert children() <= before, "no process is left"


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def play_all(spec: ProgramSpec, folder: Path, kinds: Sequence[str]) -> list[ProgramEnd]:
    async def body(play: Callable[[str], Any]) -> list[ProgramEnd]:
        return list(await asyncio.gather(*map(play, kinds)))

    return playing(spec, folder, body)


def pids_of(ends: Sequence[ProgramEnd]) -> set[int]:
    return {end.returned["pid"] for end in ends}


@pytest.mark.parametrize("num_processes", [1, 3])
def test_processes_play_many_episodes(tmp_path: Path, num_processes: int) -> None:
    ends = play_all(spec_of(tmp_path, num_processes), tmp_path, ["fine"] * 20)
    assert [end.returned["reward"] for end in ends] == [1.0] * 20
    assert len(pids_of(ends)) == num_processes


def test_answers_are_told_from_prints_and_failures_are_logged(tmp_path: Path) -> None:
    kinds = ["prints", "forges", "fails", "child"]
    ends = play_all(spec_of(tmp_path), tmp_path, kinds)
    failed = ProgramEnd(failure="KeyError: 'x'")
    assert ends == [ProgramEnd(0.5), ProgramEnd(0.25), failed, ProgramEnd(1.0)]
    assert "of mine that failed wrote:\nTraceback:\n  the whole" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("dies", "killed by SIGKILL"), ("raises", "ended with exit code 3: ValueError: broken")],
)
def test_m13_the_death_of_a_process_fails_its_episodes_and_the_next_one_starts_another(
    tmp_path: Path, kind: str, failure: str
) -> None:
    async def body(play: Callable[[str], Any]) -> list[ProgramEnd]:
        first = await play("fine")
        lost = await asyncio.gather(play("waits"), play(kind))
        return [first, *lost, await play("fine")]

    first, *lost, last = playing(spec_of(tmp_path), tmp_path, body)
    assert lost == [ProgramEnd(failure=failure)] * 2
    assert len(pids_of([first, last])) == 2


def test_an_episode_that_is_stopped_does_not_disturb_others(tmp_path: Path) -> None:
    async def body(play: Callable[[str], Any]) -> list[ProgramEnd]:
        first = await play("fine")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await play("waits")
        return [first, await play("fine")]

    assert len(pids_of(playing(spec_of(tmp_path), tmp_path, body))) == 1


def test_a_process_that_does_not_stop_an_episode_ends_when_it_plays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_commands, "STOP_WAIT_S", 0.1)

    async def body(play: Callable[[str], Any]) -> list[Any]:
        first = await play("fine")
        (pid,) = pids_of([first])
        waiting = asyncio.ensure_future(play("waits"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await play("never answers")
        second = await play("fine")
        was_there = psutil.pid_exists(pid)
        waiting.cancel()
        await asyncio.wait((waiting,))
        while psutil.pid_exists(pid):
            await asyncio.sleep(0.01)
        return [first, second, was_there]

    *ends, was_there = playing(spec_of(tmp_path), tmp_path, body)
    assert len(pids_of(ends)) == 2 and was_there


def test_a_command_that_cannot_be_started_fails_the_episode(tmp_path: Path) -> None:
    spec = ProgramSpec("mine", argv=("/no/such/command",), num_processes=1)
    ends = play_all(spec, tmp_path, ["fine", "fine"])
    assert {end.failure for end in ends} == {
        "/no/such/command cannot be started: No such file or directory"
    }


DRIVER = """
import asyncio, sys
from pathlib import Path
from tests.children.test_shared_commands import playing, spec_of

folder = Path(sys.argv[1])


async def body(play):
    await play("child")
    print("ready", flush=True)
    await play("waits")


playing(spec_of(folder), folder, body)
"""


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", DRIVER, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
        own = psutil.Process(driver.pid).children(recursive=True)
        assert len(own) == 3, "the keeper, the command and its child"
        driver.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + LONG_S
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in own):
        assert time.monotonic() < deadline, own
        time.sleep(0.01)
