# SPDX-License-Identifier: Apache-2.0
"""Groups made directly from a store, independent of the default world: across pools, and formed
anew under another name when a process was replaced.

No wait is endless: those on the host end with their ``Deadline``; work queued on a device is waited
for by the device, and ``wait_for_device`` bounds that. Leaving never waits for a peer.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store, Work

from tandem.comm.deadline import POLL_S, Deadline, GroupError
from tandem.comm.thread import CallingThread
from tandem.comm.world import create_backend

_DEVICE_POLL_S = 1e-4
_FORMING_MARGIN_S = 1.0
"""A library that has a time limit of its own, and says more, comes first: by so much, at most by
half of the limit."""
_BLOCK = 1024
"""Bytes that a process tells all others at once; if any has more, they do it twice."""
_SIZE = 8
_Backend = Any
"""A torch.distributed backend: its stubs do not know the collectives."""


class Pending(Protocol):
    """A collective under way."""

    def wait(self, deadline: Deadline) -> None:
        """Until its tensor may be used; on a device, by what this thread queues next.

        Raises:
            GroupError: it failed.
        """
        ...


class Group(Protocol):
    """Some processes that do collectives together, in the same order each."""

    members: tuple[int, ...]

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        """Start copying ``tensor`` of member ``root`` into that of all others, in place."""
        ...

    def gather(self, value: Any, deadline: Deadline) -> list[Any]:
        """The values of all members, in their order. Small picklable ones; host groups only."""
        ...

    def close(self) -> None:
        """Leave after the last collective; idempotent."""
        ...

    def abandon(self) -> None:
        """Leave at once, whatever is under way and whatever became of the peers; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """This process's place in a group.

    Attributes:
        name: the same in all members, never used before in this store.
        members: numbers of the processes, this one's included; ascending.
        rank: this process's number.
        device: where the tensors of its collectives lie.
        timeout_s: bounds forming it and, within the backend, each collective.
        library: that does them, as torch.distributed knows it.
    """

    name: str
    members: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_s: float
    library: str = "gloo"


def form_group(store: Store, place: GroupPlace) -> Group:
    """Blocks until all members are connected.

    Raises:
        GroupError: not all came in time.
    """
    store = PrefixStore(place.name, store)
    make = {"gloo": _make_gloo, "nccl": _make_nccl}.get(place.library, _make_registered)
    margin_s = min(_FORMING_MARGIN_S, place.timeout_s / 2)
    try:
        backend = _within(place.timeout_s + margin_s, lambda: make(store, place))
    except TimeoutError as error:
        raise GroupError(
            f"group {place.name}: not all were connected within {place.timeout_s:g} s"
        ) from error
    except RuntimeError as error:
        raise GroupError(f"group {place.name}: {_first_sentence(error)}") from error
    return _BackendGroup(backend, place)


def wait_for_device(stream: torch.Stream, deadline: Deadline) -> None:
    """Until all that is queued on ``stream`` is done. A device cannot be waited for with a time
    limit, hence the polling.

    Raises:
        GroupError: a collective in it does not end.
    """
    event = stream.record_event()
    while not event.query():
        deadline.check()
        time.sleep(_DEVICE_POLL_S)


class _BackendGroup:
    """Implements ``Group`` over one backend of torch.distributed."""

    def __init__(self, backend: _Backend, place: GroupPlace) -> None:
        self.members = place.members
        self._backend = backend
        self._is_host = place.device.type == "cpu"

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        options = c10d.BroadcastOptions()
        options.rootRank = self.members.index(root)
        options.rootTensor = 0
        options.asyncOp = True
        try:
            work = self._open_backend().broadcast([tensor], options)
        except RuntimeError as error:
            raise GroupError(_first_sentence(error)) from error
        return _HostWork(work) if self._is_host else _DeviceWork(work)

    def gather(self, value: Any, deadline: Deadline) -> list[Any]:
        data = pickle.dumps(value)
        blocks = self._all_gather(
            len(data).to_bytes(_SIZE, "little") + data, _BLOCK, deadline=deadline
        )
        longest = _SIZE + max(int.from_bytes(block[:_SIZE], "little") for block in blocks)
        if longest > _BLOCK:
            blocks = self._all_gather(bytes(_SIZE) + data, longest, deadline=deadline)
        return [pickle.loads(block[_SIZE:]) for block in blocks]  # which ignores what follows

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None and not self._is_host:
            with suppress(RuntimeError):  # not every library can
                backend.abort()

    def abandon(self) -> None:
        if self._is_host and self._backend is not None:
            # Its end would wait for collectives under way, which dead peers let time out.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        self.close()

    def _all_gather(self, data: bytes, size: int, *, deadline: Deadline) -> list[bytes]:
        """The first ``size`` bytes of every member's data, with zeros at its end."""
        own = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8)
        outputs = [torch.empty_like(own) for _ in self.members]
        try:
            work = self._open_backend().allgather([outputs], [own])
        except RuntimeError as error:
            raise GroupError(_first_sentence(error)) from error
        _HostWork(work).wait(deadline)
        return [output.numpy().tobytes() for output in outputs]

    def _open_backend(self) -> _Backend:
        if self._backend is None:
            raise GroupError("the group is closed")
        return self._backend


@dataclass(frozen=True, slots=True)
class _HostWork:
    work: Work

    def wait(self, deadline: Deadline) -> None:
        while True:
            with suppress(RuntimeError):  # of the work itself or of this wait: told apart below
                self.work.wait(timedelta(seconds=POLL_S))
            if self.work.is_completed():
                break
            deadline.check()
        try:
            self.work.wait()
        except RuntimeError as error:
            raise GroupError(_first_sentence(error)) from error


@dataclass(frozen=True, slots=True)
class _DeviceWork:
    work: Work

    def wait(self, deadline: Deadline) -> None:
        del deadline
        try:
            self.work.wait()  # the current stream waits, not this thread
        except RuntimeError as error:
            raise GroupError(_first_sentence(error)) from error


def _within(timeout_s: float, make: Callable[[], _Backend]) -> _Backend:
    """``make()``, on a thread that is left behind if it takes longer: NCCL connects without a time
    limit, and cannot be told to give up if a peer is gone. Raises TimeoutError."""
    thread = CallingThread("forming")
    made = thread.submit(make)
    thread.finish()
    return made.result(timeout_s)


def _make_gloo(store: Store, place: GroupPlace) -> _Backend:
    timeout = timedelta(seconds=place.timeout_s)
    rank = place.members.index(place.rank)
    return c10d.ProcessGroupGloo(store, rank, len(place.members), timeout)


def _make_nccl(store: Store, place: GroupPlace) -> _Backend:
    options = c10d.ProcessGroupNCCL.Options()
    # Its watchdog ends the whole process; our own deadline comes first and does not.
    options._timeout = timedelta(seconds=4 * place.timeout_s + 60)
    rank = place.members.index(place.rank)
    backend = c10d.ProcessGroupNCCL(store, rank, len(place.members), options)
    backend.eager_connect_single_device(place.device)
    return backend


def _make_registered(store: Store, place: GroupPlace) -> _Backend:
    """Of a vendor's library. No device's name is part of the store's keys: members may differ."""
    return create_backend(
        place.library,
        store,
        rank=place.members.index(place.rank),
        members=place.members,
        timeout_s=place.timeout_s,
    )


def _first_sentence(error: Exception) -> str:
    """What happened, without the source position and the advice around it."""
    text = str(error).splitlines()[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or text
