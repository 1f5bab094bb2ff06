# SPDX-License-Identifier: Apache-2.0
"""Process groups across pools, made directly from a store, independent of the default world.

Every wait ends: waits on the host by their ``Deadline``, waits for a device in ``wait_for_device``.
Leaving a group never waits for a peer.
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
from torch.distributed import Backend

from tandem.comm.deadline import POLL_S, Deadline, GroupError
from tandem.comm.thread import CallingThread

_DEVICE_POLL_S = 1e-4
_FORMING_MARGIN_S = 1.0
"""The margin of our own limit over the library's, whose error says more."""
_BLOCK = 1024
"""The bytes per member in the first round of ``gather``. Longer values need a second round."""
_SIZE = 8
_Backend = Any
"""A backend of torch.distributed, whose type stubs lack the collectives."""


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self, deadline: Deadline) -> None:
        """Wait until the tensor may be used. On a device, only the current stream waits.

        Raises:
            GroupError: the collective failed.
        """
        ...


class Group(Protocol):
    """Processes that perform collectives together, all in the same order."""

    members: tuple[int, ...]

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        """Start to copy ``tensor`` of process ``root`` into the tensors of all other members."""
        ...

    def gather(self, value: Any, deadline: Deadline) -> list[Any]:
        """Return the values of all members, in order. Values are small and picklable."""
        ...

    def close(self) -> None:
        """Leave the group after the last collective; idempotent."""
        ...

    def abandon(self) -> None:
        """Leave the group at once, even with pending collectives; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """The place of this process in a group.

    Attributes:
        name: the name of the group, the same in all members and new in the store.
        members: the ranks of all member processes, ascending.
        rank: the rank of this process.
        device: the device of the tensors.
        timeout_s: the time limit of forming the group and, within the backend, of each collective.
        library: the backend of the collectives, by its name in torch.distributed.
    """

    name: str
    members: tuple[int, ...]
    rank: int
    device: torch.device
    timeout_s: float
    library: str = "gloo"


def form_group(store: Store, place: GroupPlace) -> Group:
    """Form a group. Block until all members are connected.

    Raises:
        GroupError: not all members connected in time, or torch.distributed lacks the backend.
    """
    store = PrefixStore(place.name, store)
    make = {"gloo": _make_gloo, "nccl": _make_nccl}.get(place.library, _make_registered)
    margin_s = min(_FORMING_MARGIN_S, place.timeout_s / 2)
    try:
        backend = _within(place.timeout_s + margin_s, lambda: make(store, place))
    except TimeoutError as error:
        raise GroupError(
            f"group {place.name}: not all members connected within {place.timeout_s:g} s"
        ) from error
    except RuntimeError as error:
        raise GroupError(f"group {place.name}: {_first_sentence(error)}") from error
    return _BackendGroup(backend, place)


def wait_for_device(stream: torch.Stream, deadline: Deadline) -> None:
    """Wait until all work queued on ``stream`` is done. Poll, because devices have no timed wait.

    Raises:
        GroupError: a collective on the stream does not end in time.
    """
    event = stream.record_event()
    while not event.query():
        deadline.check()
        time.sleep(_DEVICE_POLL_S)


class _BackendGroup:
    """A ``Group`` over one backend of torch.distributed."""

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
        return [pickle.loads(block[_SIZE:]) for block in blocks]  # pickle ignores the padding

    def close(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None and not self._is_host:
            with suppress(RuntimeError):  # not every library can abort
                backend.abort()

    def abandon(self) -> None:
        if self._is_host and self._backend is not None:
            # Never run its destructor, which waits for pending collectives with dead peers.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._backend))
        self.close()

    def _all_gather(self, data: bytes, size: int, *, deadline: Deadline) -> list[bytes]:
        """Return the first ``size`` bytes of each member's data, padded with zeros."""
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
            with suppress(RuntimeError):  # this wait timed out, or the work failed: see below
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
    # NCCL connects without a time limit and cannot be cancelled: the thread is left behind.
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
    # NCCL's watchdog would end the whole process, so our own deadline must come first.
    options._timeout = timedelta(seconds=4 * place.timeout_s + 60)
    rank = place.members.index(place.rank)
    backend = c10d.ProcessGroupNCCL(store, rank, len(place.members), options)
    backend.eager_connect_single_device(place.device)
    return backend


def _make_registered(store: Store, place: GroupPlace) -> _Backend:
    plugin = Backend._plugins.get(place.library.upper())
    if plugin is None:
        raise GroupError(
            f"torch.distributed has no {place.library} in this process: its plug-in is not loaded"
        )
    rank, timeout = place.members.index(place.rank), timedelta(seconds=place.timeout_s)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, len(place.members), timeout)
    # Store keys contain no device type, because the members' types may differ.
    options = c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = len(place.members)
    options.timeout = timeout
    options.global_ranks_in_group = list(place.members)
    options.group_id = "tandem"
    return plugin.creator_fn(options, None)


def _first_sentence(error: Exception) -> str:
    """Return the message without its source position and advice."""
    text = str(error).splitlines()[0]
    return text.rpartition(".cc:")[2].partition("] ")[2].partition(". ")[0] or text
