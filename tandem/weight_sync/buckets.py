# SPDX-License-Identifier: Apache-2.0
"""Packing, moving and loading messages, with two buckets on each side.

A process starts its messages in the order of the plan. Before it fills a bucket again, it waits for
the messages of the bucket's last use, and for no others: one bucket is packed or loaded while the
other is on its way. On a device all of this is queued, on a stream of each side, and the host does
not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Pending, wait_for_device
from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.checksum import checksum
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.plan import ALIGNMENT, Message, Part, Route
from tandem.weight_sync.regions import Box, contains
from tandem.weight_sync.transport import Transport


@dataclass(frozen=True, slots=True)
class Location:
    """Where a part lies among the slices of a process: in number ``index`` of them, within
    (dimension, start, length) in each dimension that it does not fill."""

    index: int
    intervals: tuple[tuple[int, int, int], ...]

    def view(self, slices: Sequence[HeldSlice]) -> Tensor:
        """Of the part's shape. Without gradients: the caller sees to that.

        Raises:
            SyncError: its storage has been freed.
        """
        held = slices[self.index]
        view = held.tensor
        try:
            for dimension, start, length in self.intervals:
                view = view.narrow(dimension, start, length)
        except RuntimeError as error:
            raise SyncError(f"{held.spec.name}: its storage cannot be used ({error})") from error
        return view


def locate(parts: Iterable[Part], specs: Sequence[SliceSpec]) -> list[Location]:
    """Where each part lies among slices with these specs, one of which contains it."""
    listed: dict[str, list[tuple[int, Box]]] = {}
    for index, spec in enumerate(specs):
        listed.setdefault(spec.name, []).append((index, Box(spec.offset, spec.size)))
    locations: list[Location] = []
    for part in parts:
        index, box = next(item for item in listed[part.name] if contains(item[1], part.box))
        intervals = (
            (dimension, part.box.offset[dimension] - box.offset[dimension], size)
            for dimension, size in enumerate(part.box.size)
            if size < box.size[dimension]
        )
        locations.append(Location(index, tuple(intervals)))
    return locations


def copy_local(
    parts: Sequence[tuple[Location, Location]],
    sends: Sequence[HeldSlice],
    *,
    targets: Sequence[HeldSlice],
) -> None:
    """What a process both holds and needs; nothing where both are the same storage."""
    views = [(held.view(sends), needed.view(targets), needed) for held, needed in parts]
    apart = [item for item in views if not _is_same(item[0], item[1])]
    copy_all(
        [targets[location.index].spec.name for _, _, location in apart],
        [held for held, _, _ in apart],
        targets=[needed for _, needed, _ in apart],
    )


def _is_same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one shape are the same storage."""
    return (
        left.data_ptr() == right.data_ptr()
        and left.dtype == right.dtype
        and left.stride() == right.stride()
    )


def copy_all(names: Sequence[str], sources: list[Tensor], *, targets: list[Tensor]) -> None:
    """Copy many tensors at once, converting where dtypes differ; on a device it is only queued.

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
    """The pieces of a message in its bytes."""
    for piece in message.pieces:
        part = piece.part
        yield data.narrow(0, piece.start, part.num_bytes).view(part.dtype).view(part.box.size)


class End(Protocol):
    """Where the messages of a process come from, or where they go."""

    @property
    def num_fillings(self) -> int:
        """How many buckets have been packed or loaded."""
        ...

    def post(self, deadline: Deadline) -> None:
        """Start the next message."""
        ...

    def finish(self, deadline: Deadline) -> dict[int, int]:
        """Until all messages are where they go. Returns the checksums of their pieces."""
        ...


@dataclass(frozen=True, slots=True)
class Side:
    """What packing or loading needs to know.

    Attributes:
        slices: to pack from, or to load into.
        locations: among them, of each piece by its number.
        device: where they lie.
        bucket_bytes: of each of the two buckets.
        message_bytes: the most that a message has.
        transports: for each route of this process.
        is_checked: whether a piece, by its number, gets a checksum.
        stream: of ``device``, for this side alone; None on the host.
    """

    slices: Sequence[HeldSlice]
    locations: Mapping[int, Location]
    device: torch.device
    bucket_bytes: int
    message_bytes: int
    transports: Mapping[Route, Transport]
    is_checked: Callable[[int], bool]
    stream: torch.Stream | None = None


class Lane:
    """Implements ``End`` by two buckets, through which messages pass one after the other.

    After a failure of this process messages still pass, but nothing is packed or loaded.
    """

    def __init__(
        self, messages: Sequence[Message], side: Side, *, packs: bool, failure: FirstFailure
    ) -> None:
        """``packs`` or else loads. ``failure`` takes the first one of this process."""
        self.num_fillings = 0
        self._messages = messages
        self._side = side
        self._packs = packs
        self._failure = failure
        self._per_bucket = max(1, side.bucket_bytes // side.message_bytes)
        self._num_places = min(2 * self._per_bucket, len(messages))
        longest = max((message.num_bytes for message in messages), default=0)
        self._stride = -(-longest // ALIGNMENT) * ALIGNMENT
        self._memory: dict[torch.device, Tensor] = {}
        self._pending: list[Pending] = []
        self._checksums: dict[int, Tensor] = {}
        self._stream = side.stream
        if self._stream is not None and messages:
            self._stream.wait_stream(torch.accelerator.current_stream(side.device))

    def post(self, deadline: Deadline) -> None:
        """Start the next message, with a bucket that is packed or free."""
        number = len(self._pending)
        filling, place = divmod(number, self._per_bucket)
        route = self._messages[number].route
        with self._queueing():
            if place == 0:
                self._retire(filling - 2, deadline)
                if self._packs:
                    self._move(filling)
            transport = self._side.transports[route]
            bucket = self._bucket(number)
            self._pending.append(transport.post(bucket, sender=route.sender, deadline=deadline))

    def finish(self, deadline: Deadline) -> dict[int, int]:
        """See ``End``."""
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
        """After this the bucket of an earlier filling may be filled again."""
        for number in self._numbers(filling):
            self._pending[number].wait(deadline)
        if not self._packs:
            self._move(filling)

    def _move(self, filling: int) -> None:
        """Pack the bucket of a filling, or load it, all its tensors at once."""
        numbers = self._numbers(filling)
        if not numbers or self._failure.cause:
            return
        self.num_fillings += 1
        with self._failure.noted("packing" if self._packs else "loading"):
            pieces = [piece for number in numbers for piece in self._messages[number].pieces]
            packed = [
                view
                for number in numbers
                for view in packed_views(self._messages[number], self._bucket(number))
            ]
            slices, locations = self._side.slices, self._side.locations
            stored = [locations[piece.number].view(slices) for piece in pieces]
            sources, targets = (stored, packed) if self._packs else (packed, stored)
            copy_all([piece.part.name for piece in pieces], sources, targets=targets)
            for piece, tensor in zip(pieces, stored, strict=True):
                if self._side.is_checked(piece.number):
                    # On the device also what the host holds: it is read behind the queued copy.
                    value = tensor.to(self._side.device).to(piece.part.dtype)
                    self._checksums[piece.number] = checksum(value)

    def _numbers(self, filling: int) -> range:
        """The messages of a filling, as far as there are."""
        first = filling * self._per_bucket
        return range(max(0, first), max(0, min(first + self._per_bucket, len(self._messages))))

    def _bucket(self, number: int) -> Tensor:
        """The bytes of a message, in one of the two buckets of the transport's device."""
        message = self._messages[number]
        device = self._side.transports[message.route].device
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
        """What is queued inside goes to this lane's stream."""
        return nullcontext() if self._stream is None else self._stream
