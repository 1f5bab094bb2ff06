# SPDX-License-Identifier: Apache-2.0
"""Runs of a function in several processes, each with a device of a platform, before a deadline.

Vendors' packages are loaded only in these processes, never in the caller's.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from tandem.comm.world import WorldPlace, join_world
from tandem.platforms.record import Platform

_HOST = "127.0.0.1"
_LEAVE_S = 5.0
"""The time from the answer of a process to its end, after which it is killed."""
_PRELOADED = ["tandem.testing.contracts.suite"]
"""Modules that the fork server imports once, because importing them takes seconds."""


class ProcessError(Exception):
    """A process raised, died or took too long. The message has its rank and its traceback."""


@dataclass(frozen=True, slots=True)
class Here:
    """A process's place among the processes of a run.

    Attributes:
        device: the device of this process; ranks get the platform's devices in turn.
        store_port: the port of a TCPStore on this machine that all processes reach.
    """

    platform: Platform
    device: torch.device
    rank: int
    size: int
    store_port: int

    def connect(self, timeout_s: float = 60) -> TCPStore:
        """Connect to the store."""
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(_HOST, self.store_port, is_master=False, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Launch:
    """The conditions under which processes start.

    Attributes:
        timeout_s: the time limit of the whole run.
        environment: variables that are set before a vendor's package is loaded.
        joined: whether the processes join a world of torch.distributed before the function is
            called; their devices must be of one type.
    """

    timeout_s: float = 120
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    joined: bool = True


def run_processes(
    function: Callable[..., Any],
    platforms: Sequence[Platform],
    *,
    launch: Launch,
    args: tuple[Any, ...] = (),
) -> list[Any]:
    """Call ``function(here, *args)`` in a process for each of ``platforms``. Return the results.

    Args:
        function: a picklable function, defined at the top level of a module.

    Raises:
        ProcessError: a process failed. All processes have ended by then.
    """
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((function, args))
    size, deadline = len(platforms), time.monotonic() + launch.timeout_s
    started = [
        _start(_Start(pickle.dumps(platform), rank, size, store.port), launch, task=task)
        for rank, platform in enumerate(platforms)
    ]
    leave_s = 0.0
    try:
        answers = _collect([connection for connection, _ in started], deadline)
        leave_s = _LEAVE_S
        return answers
    finally:
        for connection, _ in started:
            connection.close()
        for _, process in started:
            process.join(leave_s)
            process.kill()
            process.join()


@dataclass(frozen=True, slots=True)
class _Start:
    """The arguments of a process. ``platform`` is unpickled once the environment is set."""

    platform: bytes
    rank: int
    size: int
    store_port: int


def _start(begin: _Start, launch: Launch, *, task: bytes) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(theirs, begin), kwargs={"launch": launch, "task": task}, daemon=True
    )
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, begin: _Start, *, launch: Launch, task: bytes) -> None:
    """Run the function in this process, and stay until all processes have finished.

    Peers may need this process's connections until then.
    """
    try:
        os.environ.update(launch.environment)
        torch.set_num_threads(1)
        here = _open(begin)
        if launch.joined:
            _join(here, launch.timeout_s)
        function, args = pickle.loads(task)
        answer = (True, function(here, *args))
    except Exception:  # the caller shows it
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):  # the caller has stopped listening: another process failed
        connection.send_bytes(pickle.dumps(answer))
        connection.poll(launch.timeout_s)
    os._exit(0)  # threads of a world whose peers are gone may never end


def _open(begin: _Start) -> Here:
    platform: Platform = pickle.loads(begin.platform)
    problem = platform.probe()
    if problem:
        raise RuntimeError(f"{platform.name}: {problem}")
    device = torch.device("cpu")
    if platform.device_type != "cpu":
        index = begin.rank % platform.num_devices()
        platform.use_device(index)
        device = torch.device(platform.device_type, index)
    platform.prepare_thread()
    return Here(platform, device, begin.rank, begin.size, begin.store_port)


def _join(here: Here, timeout_s: float) -> None:
    place = WorldPlace(
        name="world",
        rank=here.rank,
        size=here.size,
        device=here.device,
        library=here.platform.collectives,
        timeout_s=timeout_s,
    )
    join_world(here.connect(timeout_s), place)


def _collect(connections: Sequence[Connection], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(connections):
        waiting = {c: rank for rank, c in enumerate(connections) if rank not in answers}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise ProcessError(f"ranks {sorted(waiting.values())} did not finish in time")
        for connection in ready:
            assert isinstance(connection, Connection), "only connections were waited for"
            answers[waiting[connection]] = _receive(connection, waiting[connection])
    return [answers[rank] for rank in range(len(connections))]


def _receive(connection: Connection, rank: int) -> Any:
    try:
        succeeded, answer = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise ProcessError(f"rank {rank} died without an answer") from None
    if not succeeded:
        raise ProcessError(f"rank {rank} raised\n{answer}")
    return answer
