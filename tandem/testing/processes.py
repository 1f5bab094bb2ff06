# SPDX-License-Identifier: Apache-2.0
"""A function run by several processes, each with a device of a platform, before a deadline.

What vendors need of a process stays in that process: the caller's loads nothing of theirs.
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
"""How long a process whose answer has arrived may take to end before it is killed."""
_PRELOADED = ["tandem.testing.contracts.suite"]
"""Imported once, by a process that all others are forked from: it takes seconds, and does no more
than to define names."""


class ProcessError(Exception):
    """A process raised, died or took too long; the message tells which, with its traceback."""


@dataclass(frozen=True, slots=True)
class Here:
    """What a process knows of itself.

    Attributes:
        device: its own; the platform's devices are dealt to the ranks in turn.
        store_port: of a TCPStore on this machine that all of them reach.
    """

    platform: Platform
    device: torch.device
    rank: int
    size: int
    store_port: int

    def connect(self, timeout_s: float = 60) -> TCPStore:
        """The store."""
        timeout = timedelta(seconds=timeout_s)
        return TCPStore(_HOST, self.store_port, is_master=False, timeout=timeout)


@dataclass(frozen=True, slots=True)
class Launch:
    """How processes are started.

    Attributes:
        environment: variables that are set before anything of a vendor is loaded.
        joined: whether they are in a world of torch.distributed when the function is called; their
            devices are of one type then.
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
    """What ``function(here, *args)`` returns in each process, one for each of ``platforms``.

    Args:
        function: of the top level of a module, so that it can be pickled.

    Raises:
        ProcessError: one of them failed. All have ended then.
    """
    store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((function, args))
    size, deadline = len(platforms), time.monotonic() + launch.timeout_s
    started = [
        _start(_Seat(pickle.dumps(platform), rank, size, store.port), launch, task=task)
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
class _Seat:
    """The platform travels as bytes: it is unpickled after the environment was set."""

    platform: bytes
    rank: int
    size: int
    store_port: int


def _start(seat: _Seat, launch: Launch, *, task: bytes) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_run, args=(theirs, seat), kwargs={"launch": launch, "task": task}, daemon=True
    )
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, seat: _Seat, *, launch: Launch, task: bytes) -> None:
    """The life of one process. It stays until all have finished, since others may need its end of
    a connection until then."""
    try:
        os.environ.update(launch.environment)
        torch.set_num_threads(1)
        here = _open(seat)
        if launch.joined:
            _join(here, launch.timeout_s)
        function, args = pickle.loads(task)
        answer = (True, function(here, *args))
    except Exception:  # whatever it was, the caller shows it
        answer = (False, traceback.format_exc())
    with suppress(BrokenPipeError):  # nobody listens any more: another one failed before
        connection.send_bytes(pickle.dumps(answer))
        connection.poll(launch.timeout_s)
    os._exit(0)  # threads of a world whose peers are gone may never end


def _open(seat: _Seat) -> Here:
    platform: Platform = pickle.loads(seat.platform)
    problem = platform.probe()
    if problem:
        raise RuntimeError(f"{platform.name}: {problem}")
    device = torch.device("cpu")
    if platform.device_type != "cpu":
        index = seat.rank % platform.num_devices()
        platform.use_device(index)
        device = torch.device(platform.device_type, index)
    platform.prepare_thread()
    return Here(platform, device, seat.rank, seat.size, seat.store_port)


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
        raise ProcessError(f"rank {rank} died without a word") from None
    if not succeeded:
        raise ProcessError(f"rank {rank} raised\n{answer}")
    return answer
