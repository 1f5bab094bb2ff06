# SPDX-License-Identifier: Apache-2.0
"""All messages of one transfer, as one process of the link sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.comm.deadline import Deadline
from tandem.types import HeldSlice
from tandem.weight_sync.buckets import End, Lane, Side, copy_local
from tandem.weight_sync.failure import FirstFailure
from tandem.weight_sync.handshake import FormedLink, LinkPlace, LinkSettings
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport import Transport


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one transfer did in this process: bytes with padding, buckets packed."""

    version: int
    duration_s: float
    sent_bytes: int
    received_bytes: int
    num_packs: int


@dataclass(frozen=True, slots=True)
class Moved:
    """What a process did. The checksums of the pieces that it sent or received, by number."""

    checksums: dict[int, int]
    sent_bytes: int
    received_bytes: int
    num_packs: int
    num_loads: int

    def report(self, version: int, *, duration_s: float) -> TransferReport:
        """For the caller."""
        return TransferReport(
            version, duration_s, self.sent_bytes, self.received_bytes, self.num_packs
        )


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

    def post(self, source: End, target: End) -> None:
        """Start every message of this process. A failure of this process alone ends up in
        ``failure``.

        Raises:
            GroupError: another process is gone or does not take part.
        """
        rank, plan = self.place.rank, self.formed.plan
        for message in plan.messages:
            if rank == message.route.sender:
                source.post(self.deadline)
            elif rank in message.route.receivers:
                target.post(self.deadline)

    def finish(self, source: End, target: End) -> Moved:
        """Until all messages are where they go. Errors as ``post``."""
        return Moved(
            checksums={**source.finish(self.deadline), **target.finish(self.deadline)},
            sent_bytes=sum(message.num_bytes for message in self.formed.sent),
            received_bytes=sum(message.num_bytes for message in self.formed.received),
            num_packs=source.num_fillings,
            num_loads=target.num_fillings,
        )

    def copy_local(self, sends: Sequence[HeldSlice], targets: Sequence[HeldSlice]) -> None:
        """What this process both holds and needs."""
        if not self.failure.cause:
            with self.failure.noted("copying what the process holds itself"):
                copy_local(self.formed.local, sends, targets=targets)

    def packing(
        self, sends: Sequence[HeldSlice], transports: Mapping[Route, Transport] | None = None
    ) -> Lane:
        """From ``sends``, through the link's transports or others."""
        side = self._side(sends, self.settings.send_bucket_bytes, transports=transports)
        side = replace(side, stream=self.streams.packing)
        return Lane(self.formed.sent, side, packs=True, failure=self.failure)

    def loading(
        self, targets: Sequence[HeldSlice], transports: Mapping[Route, Transport] | None = None
    ) -> Lane:
        """Into ``targets``, likewise."""
        side = self._side(targets, self.settings.receive_bucket_bytes, transports=transports)
        side = replace(side, stream=self.streams.loading)
        return Lane(self.formed.received, side, packs=False, failure=self.failure)

    def _side(
        self,
        slices: Sequence[HeldSlice],
        bucket_bytes: int,
        *,
        transports: Mapping[Route, Transport] | None,
    ) -> Side:
        return Side(
            slices=slices,
            locations=self.formed.locations,
            device=self.place.device,
            bucket_bytes=bucket_bytes,
            message_bytes=self.formed.message_bytes,
            transports=self.formed.transports if transports is None else transports,
            is_checked=self.is_checked,
        )


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
