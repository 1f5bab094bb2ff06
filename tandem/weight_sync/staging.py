# SPDX-License-Identifier: Apache-2.0
"""Copies of the weights: the copy that is sent, and the copies in which versions arrive.

A version replaces the weights whole or not at all, when their user chooses. This file starts no
threads and does not communicate with other processes.
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
from tandem.weight_sync.checksum import checksum
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import FormedLink, LinkPlace, LinkSettings
from tandem.weight_sync.plan import Message, Route
from tandem.weight_sync.transfer import (
    BucketStream,
    MessageStream,
    Transfer,
    copy_all,
    packed_views,
)
from tandem.weight_sync.transport import Done, Transport


class VersionCopy(Protocol):
    """Memory in which a version arrives while the one before it is in use."""

    def receiving(self, transfer: Transfer) -> MessageStream:
        """Return the sink for the messages of this process."""
        ...

    def replace(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        """Replace ``live`` by the version that has arrived. Return the number of buckets loaded.

        A failure is kept in ``transfer.failure``.
        """
        ...


class DeviceCopy:
    """A ``VersionCopy`` on the device of the weights."""

    def __init__(self, live: Sequence[HeldSlice]) -> None:
        self._slices = [
            HeldSlice(held.spec, torch.empty_like(held.tensor, requires_grad=False))
            for held in live
        ]

    def receiving(self, transfer: Transfer) -> MessageStream:
        return transfer.loading(self._slices)

    def replace(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        with transfer.failure.noted("replacing the weights"):
            names = [held.spec.name for held in live]
            sources = [held.tensor for held in self._slices]
            copy_all(names, sources, targets=[held.tensor.detach() for held in live])
        return 0


class HostCopy:
    """A ``VersionCopy`` of whole messages in host memory; a sender packs its weights into one."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        """Allocate memory for ``messages``, which ``device`` writes and reads."""
        self.messages = tuple(messages)
        is_pinned = device.type != "cpu"
        # One tensor for each message: pinned memory is allocated in powers of two, and most
        # messages have such a size.
        self.data = tuple(
            torch.empty(message.num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
            for message in messages
        )
        self._checksums: dict[int, int] = {}
        self._num_packs = 0

    def pack(self, transfer: Transfer, sends: Sequence[HeldSlice]) -> None:
        """Copy the current weights. A failure is kept in ``transfer.failure``."""
        stream = transfer.packing(sends, self._crossing(transfer, to_host=True))
        self._checksums = self._pass(stream, transfer.deadline)
        self._num_packs = stream.num_fillings

    def sending(self, transfer: Transfer) -> MessageStream:
        """Return the source of the packed messages."""
        return _HostStream(self, transfer, num_fillings=self._num_packs, checksums=self._checksums)

    def receiving(self, transfer: Transfer) -> MessageStream:
        return _HostStream(self, transfer)

    def replace(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        stream = transfer.loading(live, self._crossing(transfer, to_host=False))
        self._pass(stream, transfer.deadline)
        return stream.num_fillings

    def _pass(self, stream: BucketStream, deadline: Deadline) -> dict[int, int]:
        for _ in self.messages:
            stream.post(deadline)
        return stream.finish(deadline)

    def _crossing(self, transfer: Transfer, *, to_host: bool) -> Mapping[Route, Transport]:
        """Return one transport for all routes: the messages stay in this process."""
        crossing = _Crossing(transfer.place.device, iter(self.data), to_host)
        return dict.fromkeys((message.route for message in self.messages), crossing)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A ``Transport`` between a bucket on a device and the next message on the host."""

    device: torch.device
    data: Iterator[Tensor]
    to_host: bool

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del sender, deadline
        stored = next(self.data)
        target, source = (stored, bucket) if self.to_host else (bucket, stored)
        target.copy_(source, non_blocking=True)
        return Done()  # for work that is queued later on the same stream


class _HostStream:
    """A ``MessageStream`` without buckets. Received messages get checksums."""

    def __init__(
        self,
        copy: HostCopy,
        transfer: Transfer,
        *,
        num_fillings: int = 0,
        checksums: Mapping[int, int] | None = None,
    ) -> None:
        """Send with known ``checksums``, or receive if they are None."""
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
            for segment, view in zip(message.segments, packed_views(message, data), strict=True):
                if self._transfer.is_checked(segment.number):
                    sums[segment.number] = int(checksum(view))
        return sums


def make_copies(
    place: LinkPlace, settings: LinkSettings, *, formed: FormedLink, live: Sequence[HeldSlice]
) -> list[VersionCopy]:
    """Allocate the copies in which versions of ``live`` arrive."""
    if settings.staged:
        return [HostCopy(formed.received, place.device) for _ in range(settings.num_copies)]
    return [DeviceCopy(live) for _ in range(settings.num_copies)]


class StagedVersions:
    """The copies in which versions arrive, and the newest whole version that is not in use yet.

    ``expect`` is called before the receiving thread starts, which calls ``claim``, ``arrive`` and
    ``settle``. The thread that uses the weights calls ``wait`` and ``taking``. A copy that is
    replacing the weights is not claimed. A copy whose version was never put in use is claimed if
    there is no other, and that version is skipped.
    """

    def __init__(self, copies: Sequence[VersionCopy]) -> None:
        self._copies = tuple(copies)
        self._condition = threading.Condition()
        self._newest: tuple[int, VersionCopy] | None = None
        self._being_put: VersionCopy | None = None
        self._is_expecting = False

    def expect(self) -> None:
        """Expect a version."""
        self._is_expecting = True

    def settle(self) -> None:
        """Stop expecting: the version has arrived, or never will."""
        with self._condition:
            self._is_expecting = False
            self._condition.notify_all()

    def claim(self, timeout_s: float) -> VersionCopy:
        """Return a copy for the next version to arrive in.

        Raises:
            SyncError: putting the only copy in use takes longer than ``timeout_s``.
        """
        with self._condition:
            newest = self._newest[1] if self._newest else None
            copy = next((copy for copy in self._copies if copy is not newest), self._copies[0])
            if not self._condition.wait_for(lambda: copy is not self._being_put, timeout_s):
                raise SyncError(f"weights are being put in use for longer than {timeout_s:g} s")
            if self._newest is not None and copy is self._newest[1]:
                self._newest = None
            return copy

    def arrive(self, copy: VersionCopy, version: int) -> None:
        """Declare that ``copy`` holds all of ``version``."""
        with self._condition:
            self._newest = (version, copy)
            self._condition.notify_all()

    def wait(self, version: int) -> None:
        """Wait until ``version`` or a later one has arrived, or none is expected."""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    not self._is_expecting
                    or (self._newest is not None and self._newest[0] >= version)
                )
            )

    @contextmanager
    def taking(self) -> Iterator[tuple[int, VersionCopy] | None]:
        """Yield the newest version, or None if none is new; keep it unchanged until the block ends.

        The version counts as in use once the block succeeds.
        """
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
