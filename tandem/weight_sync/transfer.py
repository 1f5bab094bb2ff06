# SPDX-License-Identifier: Apache-2.0
"""A transfer in one process: packing, moving and loading messages, with two buckets per side.

A process starts its messages in the order of the plan. Before it fills a bucket again, it waits for
the messages of the bucket's last use only, so that one bucket is packed or loaded while the other
is in transit. On a device, all of this is queued on one stream per side; the host does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Pending, wait_for_device
from tandem.types import HeldSlice
from tandem.weight_sync.checksum import checksum
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.handshake import FormedLink, LinkPlace, LinkSettings
from tandem.weight_sync.plan import ALIGNMENT, Message, Route
from tandem.weight_sync.transport import Transport


@dataclass(frozen=True, slots=True)
class TransferReport:
    """The work of one transfer in this process; bytes include padding."""

    version: int
    duration_s: float
    sent_bytes: int
    received_bytes: int
    num_packs: int


class MessageStream(Protocol):
    """A source or a sink of the messages of a process."""

    @property
    def num_fillings(self) -> int:
        """The number of buckets that have been packed or loaded."""
        ...

    def post(self, deadline: Deadline) -> None:
        """Start the next message."""
        ...

    def finish(self, deadline: Deadline) -> dict[int, int]:
        """Wait until all messages have arrived. Return the checksums of their segments."""
        ...


@dataclass(frozen=True, slots=True)
class TransferStreams:
    """The streams on which packing and loading are queued; None on the host.

    A link keeps them, because the allocator keeps memory for every stream that ever used it.
    """

    packing: torch.Stream | None
    loading: torch.Stream | None


def make_streams(device: torch.device) -> TransferStreams:
    """Make the streams of a link with tensors on ``device``."""
    if device.type == "cpu":
        return TransferStreams(None, None)
    return TransferStreams(torch.Stream(device), torch.Stream(device))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer, as one process performs it.

    Attributes:
        is_checked: returns whether the segment with a number gets a checksum; the same in all
            processes.
        failure: keeps the first failure of this process alone.
    """

    formed: FormedLink
    place: LinkPlace
    settings: LinkSettings
    streams: TransferStreams
    is_checked: Callable[[int], bool]
    failure: FirstFailure
    deadline: Deadline

    def post(self, source: MessageStream, target: MessageStream) -> None:
        """Start every message of this process.

        Raises:
            GroupError: another process is gone or does not take part.
        """
        rank, plan = self.place.rank, self.formed.plan
        for message in plan.messages:
            if rank == message.route.sender:
                source.post(self.deadline)
            elif rank in message.route.receivers:
                target.post(self.deadline)

    def copy_local(self, sends: Sequence[HeldSlice], targets: Sequence[HeldSlice]) -> None:
        """Copy the regions that this process both holds and needs, unless they share storage."""
        if self.failure.cause:
            return
        with self.failure.noted("copying regions within the process"):
            views = [
                (targets[needed.index].spec.name, held.tensor(sends), needed.tensor(targets))
                for held, needed in self.formed.local
            ]
            apart = [view for view in views if not _is_same(view[1], view[2])]
            copy_all(
                [name for name, _, _ in apart],
                [held for _, held, _ in apart],
                targets=[needed for _, _, needed in apart],
            )

    def packing(
        self, sends: Sequence[HeldSlice], transports: Mapping[Route, Transport] | None = None
    ) -> BucketStream:
        """Return a stream from ``sends``, through the link's transports or others."""
        return BucketStream(self, sends, packs=True, transports=transports)

    def loading(
        self, targets: Sequence[HeldSlice], transports: Mapping[Route, Transport] | None = None
    ) -> BucketStream:
        """Return a stream into ``targets``, through the link's transports or others."""
        return BucketStream(self, targets, packs=False, transports=transports)


class BucketStream:
    """A ``MessageStream`` through two buckets.

    After a failure of this process, messages still pass, but nothing is packed or loaded.
    """

    def __init__(
        self,
        transfer: Transfer,
        slices: Sequence[HeldSlice],
        *,
        packs: bool,
        transports: Mapping[Route, Transport] | None = None,
    ) -> None:
        """Pack from ``slices`` if ``packs``, else load into them."""
        formed, settings, streams = transfer.formed, transfer.settings, transfer.streams
        bucket_bytes = settings.send_bucket_bytes if packs else settings.receive_bucket_bytes
        self.num_fillings = 0
        self._transfer = transfer
        self._slices = slices
        self._packs = packs
        self._messages = formed.sent if packs else formed.received
        self._transports = formed.transports if transports is None else transports
        self._stream = streams.packing if packs else streams.loading
        self._per_bucket = max(1, bucket_bytes // formed.message_bytes)
        self._num_places = min(2 * self._per_bucket, len(self._messages))
        longest = max((message.num_bytes for message in self._messages), default=0)
        self._stride = -(-longest // ALIGNMENT) * ALIGNMENT
        self._memory: dict[torch.device, Tensor] = {}
        self._pending: list[Pending] = []
        self._checksums: dict[int, Tensor] = {}
        if self._stream is not None and self._messages:
            current = torch.accelerator.current_stream(transfer.place.device)
            self._stream.wait_stream(current)

    def post(self, deadline: Deadline) -> None:
        """Start the next message, in a bucket that is packed or free."""
        number = len(self._pending)
        filling, place = divmod(number, self._per_bucket)
        route = self._messages[number].route
        with self._queueing():
            if place == 0:
                self._retire(filling - 2, deadline)
                if self._packs:
                    self._copy(filling)
            bucket = self._bucket(number)
            transport = self._transports[route]
            self._pending.append(transport.post(bucket, sender=route.sender, deadline=deadline))

    def finish(self, deadline: Deadline) -> dict[int, int]:
        """See ``MessageStream``."""
        last = (len(self._messages) - 1) // self._per_bucket
        with self._queueing():
            self._retire(last - 1, deadline)
            self._retire(last, deadline)
            sums = list(self._checksums.values())
            values = torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)
        if self._stream is not None and self._messages:
            wait_for_device(self._stream, deadline)
        return dict(zip(self._checksums, values.tolist(), strict=True))

    def _retire(self, filling: int, deadline: Deadline) -> None:
        """Wait for an earlier filling and load it, so that its bucket is free."""
        for number in self._numbers(filling):
            self._pending[number].wait(deadline)
        if not self._packs:
            self._copy(filling)

    def _copy(self, filling: int) -> None:
        """Pack or load the bucket of a filling, all its tensors at once."""
        numbers, transfer = self._numbers(filling), self._transfer
        if not numbers or transfer.failure.cause:
            return
        self.num_fillings += 1
        with transfer.failure.noted("packing" if self._packs else "loading"):
            segments = [one for number in numbers for one in self._messages[number].segments]
            packed = [
                view
                for number in numbers
                for view in packed_views(self._messages[number], self._bucket(number))
            ]
            views = transfer.formed.views
            stored = [views[one.number].tensor(self._slices) for one in segments]
            sources, targets = (stored, packed) if self._packs else (packed, stored)
            copy_all([one.content.name for one in segments], sources, targets=targets)
            for segment, tensor in zip(segments, stored, strict=True):
                if transfer.is_checked(segment.number):
                    # A tensor on the host goes to the device first, to be read after the copy that
                    # is queued there.
                    value = tensor.to(transfer.place.device).to(segment.content.dtype)
                    self._checksums[segment.number] = checksum(value)

    def _numbers(self, filling: int) -> range:
        """Return the numbers of a filling's messages; none before the first or after the last."""
        first = filling * self._per_bucket
        return range(max(0, first), max(0, min(first + self._per_bucket, len(self._messages))))

    def _bucket(self, number: int) -> Tensor:
        """Return the bytes of a message, in one of the two buckets on the transport's device."""
        message = self._messages[number]
        device = self._transports[message.route].device
        if device not in self._memory:
            self._memory[device] = torch.empty(
                self._num_places * self._stride,
                dtype=torch.uint8,
                device=device,
                pin_memory=self._stream is not None and device.type == "cpu",
            )
        start = number % self._num_places * self._stride
        return self._memory[device][start : start + message.num_bytes]

    def _queueing(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else self._stream


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one shape are the same storage."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.stride() == right.stride()
    )


def copy_all(names: Sequence[str], sources: list[Tensor], *, targets: list[Tensor]) -> None:
    """Copy many tensors at once and convert their dtypes. On a device the copies are only queued.

    Raises:
        SyncError: names the tensor that cannot be copied.
    """
    if not names:
        return
    try:
        torch.ops.aten._foreach_copy_(targets, sources, non_blocking=True)
    except RuntimeError:
        for name, source, target in zip(names, sources, targets, strict=True):
            try:
                target.copy_(source)
            except RuntimeError as error:
                raise SyncError(f"{name}: it cannot be copied ({error})") from error


def packed_views(message: Message, data: Tensor) -> Iterator[Tensor]:
    """Yield the segments of a message as views of its bytes."""
    for segment in message.segments:
        content = segment.content
        yield (
            data.narrow(0, segment.start, content.num_bytes)
            .view(content.dtype)
            .view(content.region.size)
        )
