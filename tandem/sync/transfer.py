# SPDX-License-Identifier: Apache-2.0
"""All messages of one transfer, as one process of the link sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.comm.deadline import Deadline
from tandem.sync.buckets import Lane, Side, SliceTable, copy_local
from tandem.sync.failure import FirstFailure
from tandem.sync.forming import FormedLink, LinkPlace, LinkSettings
from tandem.sync.plan import Message
from tandem.types import HeldSlice


@dataclass(frozen=True, slots=True)
class Moved:
    """What a process did. The checksums of the pieces that it sent or received, by number."""

    checksums: dict[int, int]
    sent_bytes: int
    received_bytes: int
    num_packs: int
    num_loads: int


@dataclass(frozen=True, slots=True)
class LaneStreams:
    """Where packing and loading are queued; None on the host. A link keeps them, because allocated
    memory is kept for each stream that ever used it."""

    packing: torch.Stream | None
    loading: torch.Stream | None


def make_streams(device: torch.device) -> LaneStreams:
    """Of a link whose tensors lie on ``device``."""
    if device.type == "cpu":
        return LaneStreams(None, None)
    return LaneStreams(torch.Stream(device), torch.Stream(device))


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer in one process. ``is_checked`` says of which pieces checksums are made, and is
    the same in all processes."""

    formed: FormedLink
    place: LinkPlace
    settings: LinkSettings
    streams: LaneStreams
    is_checked: Callable[[int], bool]
    failure: FirstFailure
    deadline: Deadline

    def run(self, sends: Sequence[HeldSlice], targets: Sequence[HeldSlice]) -> Moved:
        """Take part in every message of this process. A failure of this process alone ends up in
        ``failure``.

        Raises:
            GroupError: another process is gone or does not take part.
        """
        rank, plan = self.place.rank, self.formed.plan
        source, target = SliceTable(sends), SliceTable(targets)
        if not self.failure.cause:
            with self.failure.noted("copying what the process holds itself"):
                copy_local(plan.local[rank], source, target=target)
        sent = [message for message in plan.messages if rank == message.route.sender]
        received = [message for message in plan.messages if rank in message.route.receivers]
        packing = self._lane(sent, source, packs=True)
        loading = self._lane(received, target, packs=False)
        for message in plan.messages:
            if rank == message.route.sender:
                packing.post(self.deadline)
            elif rank in message.route.receivers:
                loading.post(self.deadline)
        return Moved(
            checksums={**packing.finish(self.deadline), **loading.finish(self.deadline)},
            sent_bytes=sum(message.num_bytes for message in sent),
            received_bytes=sum(message.num_bytes for message in received),
            num_packs=packing.num_fillings,
            num_loads=loading.num_fillings,
        )

    def _lane(self, messages: Sequence[Message], table: SliceTable, *, packs: bool) -> Lane:
        settings = self.settings
        side = Side(
            table=table,
            device=self.place.device,
            bucket_bytes=settings.send_bucket_bytes if packs else settings.receive_bucket_bytes,
            message_bytes=self.formed.message_bytes,
            transports=self.formed.transports,
            is_checked=self.is_checked,
            stream=self.streams.packing if packs else self.streams.loading,
        )
        return Lane(messages, side, packs=packs, failure=self.failure)


def find_mismatch(formed: FormedLink, checksums: Sequence[dict[int, int]]) -> str:
    """Names a piece that did not arrive as it was sent, "" if all did. ``checksums`` are those of
    all processes."""
    arrivals = (
        (piece, message.route.sender, receiver)
        for message in formed.plan.messages
        for piece in message.pieces
        for receiver in message.route.receivers
    )
    for piece, sender, receiver in arrivals:
        if checksums[receiver].get(piece.number) != checksums[sender].get(piece.number):
            return (
                f"{piece.part.name}: {piece.part.box} arrived corrupt, "
                f"from {formed.roles[sender]} at {formed.roles[receiver]}"
            )
    return ""
