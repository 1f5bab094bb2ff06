# SPDX-License-Identifier: Apache-2.0
"""A function run by several real processes that share a world, with a deadline.

Nothing is shared with the processes: arguments and results are pickled as plain bytes, tensors
included, and each process computes with one thread.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from tandem.comm.store import connect_store
from tests.fakes.preloading import with_preloaded

HOST = "127.0.0.1"
DEADLINE_S = 600.0
"""A correct function ends in seconds, and in minutes on a busy machine."""
_LEAVE_S = 5.0
"""How long a process whose result has arrived may take to end before it is killed."""

_PRELOADED = ["tandem.engines.fsdp", "tests.unit.models.tiny_models"]
"""Imported once, by a process that all others are forked from: it takes seconds, and does no more
than to define names."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = DEADLINE_S,
    joined: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """What ``function(rank, size, store_port, *args)`` returns on each of ``size`` ranks.

    Args:
        function: of the top level of a module, so that it can be pickled.
        args: picklable; each rank has its own copy.
        timeout_s: for the whole, and for every wait of the default world.
        joined: each process is in a world, torch.distributed's default, before it calls; without,
            only the store on ``store_port`` of ``HOST`` is there for it.
        backend: that of the world. With NCCL, a process has the GPU of its rank.

    Raises:
        AssertionError: a rank raised (its traceback is the message), died or took too long. All
            processes have ended then.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    task = pickle.dumps((function, args))
    deadline = time.monotonic() + timeout_s
    ranks = [
        _start(_Place(rank, size, store.port, timeout_s, joined, backend), task)
        for rank in range(size)
    ]
    leave_s = 0.0
    try:
        results = _collect(ranks, deadline)
        leave_s = _LEAVE_S
        return results
    finally:
        for connection, _ in ranks:
            connection.close()
        for _, process in ranks:
            process.join(leave_s)
            process.kill()
            process.join()


@dataclass(frozen=True)
class _Place:
    rank: int
    size: int
    store_port: int
    timeout_s: float
    joined: bool
    backend: str


def fork_until(key: str, store_port: int, function: Callable[[], None]) -> int:
    """A child that waits for ``key`` of the store and calls ``function``, which it is not meant to
    survive. To be forked before there are threads: what one of them holds is never given back in a
    child.
    """
    child = os.fork()
    if not child:
        try:
            connect_store(HOST, store_port, timeout_s=DEADLINE_S).wait([key])
            function()
        finally:
            os._exit(1)
    return child


def _start(place: _Place, task: bytes) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(with_preloaded(_PRELOADED))
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, place, task), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, place: _Place, task: bytes) -> None:
    """The life of one process. It stays until all have finished, since others may need its end of
    a connection until then."""
    faulthandler.dump_traceback_later(0.9 * place.timeout_s, file=sys.__stderr__)
    torch.set_num_threads(1)
    try:
        if place.joined:
            _join(place)
        function, args = pickle.loads(task)
        result = function(place.rank, place.size, place.store_port, *args)
        answer = (True, result)
    except Exception:  # whatever it was, the test shows it
        answer = (False, traceback.format_exc())
    with suppress(ConnectionError):  # nobody listens any more: another rank failed before
        connection.send_bytes(pickle.dumps(answer))
        connection.poll(place.timeout_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a world whose peers are gone may never end


def _join(place: _Place) -> None:
    timeout = timedelta(seconds=place.timeout_s)
    store = dist.TCPStore(HOST, place.store_port, is_master=False, timeout=timeout)
    if "nccl" in place.backend:
        torch.cuda.set_device(place.rank)
    dist.init_process_group(
        place.backend,
        store=dist.PrefixStore("world", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
    )


def _collect(ranks: list[tuple[Connection, BaseProcess]], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {c: rank for rank, (c, _) in enumerate(ranks) if rank not in results}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"ranks {sorted(waiting.values())} had not finished before the deadline"
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            results[rank] = _receive(connection, rank)
    return [results[rank] for rank in range(len(ranks))]


def _receive(connection: Connection, rank: int) -> Any:
    try:
        succeeded, result = pickle.loads(connection.recv_bytes())
    except EOFError:
        raise AssertionError(f"rank {rank} died without a word") from None
    assert succeeded, f"rank {rank} raised\n{result}"
    return result
