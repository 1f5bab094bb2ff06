# SPDX-License-Identifier: Apache-2.0
"""Copies of a version beside the weights in use: what is sent from, and what it arrives in.

A version is put in use whole or not at all, by whoever uses the weights and when they choose. Not
here: threads, and what is told to other processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Pending
from tandem.types import HeldSlice
from tandem.weight_sync.buckets import End, Lane, copy_all, packed_views
from tandem.weight_sync.checksum import checksum
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import FormedLink, LinkPlace, LinkSettings
from tandem.weight_sync.plan import Message, Route
from tandem.weight_sync.transfer import Transfer
from tandem.weight_sync.transport import Done, Transport


class Copy(Protocol):
    """Where a version arrives while the one before it is in use."""

    def receiving(self, transfer: Transfer) -> End:
        """Takes in the messages of this process."""
        ...

    def put(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        """Replace ``live`` by what has arrived. Returns how many buckets were loaded. A failure
        ends up in ``transfer.failure``."""
        ...


class DeviceCopy:
    """Implements ``Copy`` where the weights lie."""

    def __init__(self, live: Sequence[HeldSlice]) -> None:
        self._slices = [
            HeldSlice(held.spec, torch.empty_like(held.tensor, requires_grad=False))
            for held in live
        ]

    def receiving(self, transfer: Transfer) -> End:
        return transfer.loading(self._slices)

    def put(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        with transfer.failure.noted("replacing the weights"):
            names = [held.spec.name for held in live]
            sources = [held.tensor for held in self._slices]
            copy_all(names, sources, targets=[held.tensor.detach() for held in live])
        return 0


class HostCopy:
    """Implements ``Copy`` by messages in the host's memory; also what a process sends, packed."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        """``device`` reads and writes it."""
        self.messages = tuple(messages)
        is_pinned = device.type != "cpu"
        # Not one tensor: pinned memory comes in powers of two, and most buckets are such.
        self.data = tuple(
            torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for message in messages
        )
        self._checksums: dict[int, int] = {}
        self._num_packs = 0

    def pack(self, transfer: Transfer, sends: Sequence[HeldSlice]) -> None:
        """Take the weights as they are now. Errors as ``put``."""
        lane = transfer.packing(sends, self._crossing(transfer, to_host=True))
        self._checksums = self._pass(lane, transfer.deadline)
        self._num_packs = lane.num_fillings

    def sending(self, transfer: Transfer) -> End:
        """Gives out the messages that were packed."""
        return _HostEnd(self, transfer, num_fillings=self._num_packs, checksums=self._checksums)

    def receiving(self, transfer: Transfer) -> End:
        return _HostEnd(self, transfer)

    def put(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        lane = transfer.loading(live, self._crossing(transfer, to_host=False))
        self._pass(lane, transfer.deadline)
        return lane.num_fillings

    def _pass(self, lane: Lane, deadline: Deadline) -> dict[int, int]:
        for _ in self.messages:
            lane.post(deadline)
        return lane.finish(deadline)

    def _crossing(self, transfer: Transfer, *, to_host: bool) -> Mapping[Route, Transport]:
        """For a lane of this process alone, whatever the route of a message is."""
        crossing = _Crossing(transfer.place.device, iter(self.data), to_host)
        return dict.fromkeys((message.route for message in self.messages), crossing)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Implements ``Transport`` between a bucket on a device and the next message on the host."""

    device: torch.device
    data: Iterator[Tensor]
    to_host: bool

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del sender, deadline
        stored = next(self.data)
        target, source = (stored, bucket) if self.to_host else (bucket, stored)
        target.copy_(source, non_blocking=True)
        return Done()  # for what the lane queues next


class _HostEnd:
    """Implements ``End`` by messages that need no buckets. Those that arrive get checksums."""

    def __init__(
        self,
        copy: HostCopy,
        transfer: Transfer,
        *,
        num_fillings: int = 0,
        checksums: Mapping[int, int] | None = None,
    ) -> None:
        """``checksums`` of what is sent; None if it is received."""
        self.num_fillings = num_fillings
        self._copy = copy
        self._transfer = transfer
        self._checksums = checksums
        self._pending: list[Pending] = []

    def post(self, deadline: Deadline) -> None:
        number = len(self._pending)
        route = self._copy.messages[number].route
        transport = self._transfer.formed.transports[route]
        data = self._copy.data[number]
        self._pending.append(transport.post(data, sender=route.sender, deadline=deadline))

    def finish(self, deadline: Deadline) -> dict[int, int]:
        sums = dict(self._checksums or {})
        for pending, message, data in zip(
            self._pending, self._copy.messages, self._copy.data, strict=True
        ):
            pending.wait(deadline)
            if self._checksums is not None:
                continue
            for piece, view in zip(message.pieces, packed_views(message, data), strict=True):
                if self._transfer.is_checked(piece.number):
                    sums[piece.number] = int(checksum(view))
        return sums


def make_copies(
    place: LinkPlace, settings: LinkSettings, *, formed: FormedLink, live: Sequence[HeldSlice]
) -> list[Copy]:
    """Those in which versions of ``live`` arrive."""
    if settings.staged:
        return [HostCopy(formed.received, place.device) for _ in range(settings.num_copies)]
    return [DeviceCopy(live) for _ in range(settings.num_copies)]


class Arrivals:
    """Which copy takes in the next version, and the newest that is whole and not in use yet.

    One thread receives: ``expect`` (on behalf of it), ``claim``, ``arrive``, ``settle``. Another
    one puts in use: ``wait``, ``taking``. A copy that is being put in use is not claimed; one whose
    version was never put in use is, if there is no other, and that version is skipped.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = tuple(copies)
        self._condition = threading.Condition()
        self._newest: tuple[int, Copy] | None = None
        self._being_put: Copy | None = None
        self._is_expecting = False

    def expect(self) -> None:
        """A version is coming."""
        self._is_expecting = True

    def settle(self) -> None:
        """It has come, or never will."""
        with self._condition:
            self._is_expecting = False
            self._condition.notify_all()

    def claim(self, timeout_s: float) -> Copy:
        """A copy for the next version.

        Raises:
            SyncError: there is only one, and it is being put in use for longer than ``timeout_s``.
        """
        with self._condition:
            newest = self._newest[1] if self._newest else None
            copy = next((copy for copy in self._copies if copy is not newest), self._copies[0])
            if not self._condition.wait_for(lambda: copy is not self._being_put, timeout_s):
                raise SyncError(f"weights are being put in use for longer than {timeout_s:g} s")
            if self._newest is not None and copy is self._newest[1]:
                self._newest = None
            return copy

    def arrive(self, copy: Copy, version: int) -> None:
        """``copy`` holds ``version``, whole."""
        with self._condition:
            self._newest = (version, copy)
            self._condition.notify_all()

    def wait(self, version: int) -> None:
        """Until it is there, or a later one, or none is expected."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    not self._is_expecting
                    or (self._newest is not None and self._newest[0] >= version)
                )
            )

    @contextmanager
    def taking(self) -> Iterator[tuple[int, Copy] | None]:
        """The newest version, which stays as it is until the block ends; None if none is new. It
        is new no longer if the block succeeds."""
        with self._condition:
            taken = self._newest
            self._being_put = taken[1] if taken else None
        try:
            yield taken
            with self._condition:
                if self._newest is taken:
                    self._newest = None
        finally:
            with self._condition:
                self._being_put = None
                self._condition.notify_all()
