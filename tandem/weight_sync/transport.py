# SPDX-License-Identifier: Apache-2.0
"""The transports of messages from the sender's bucket into the receivers' buckets.

A route may have a relay, which gets each message from the sender and passes it on with the native
library of its platform. Packing and loading do not depend on it.
Tensors that share their storage, or lie in one process, need no transport: see ``transfer``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, Pending
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport_choice import (
    Endpoint,
    RouteChoice,
    TransportKind,
    choose_route,
)

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


class Transport(Protocol):
    """A connection between the processes of a group.

    Posting and waiting follow the order of the current stream: work queued before ``post`` is done
    before the bucket is touched, and work queued after ``Pending.wait`` sees the message.
    """

    @property
    def device(self) -> torch.device:
        """The device of its buckets."""
        ...

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        """Start a message. ``bucket`` is uint8 and has the message's length in all processes."""
        ...


@dataclass(frozen=True, slots=True)
class Collective:
    """A ``Transport`` by the group's own broadcast."""

    group: Group
    device: torch.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del deadline
        return self.group.broadcast(bucket, root=sender)


@dataclass(frozen=True, slots=True)
class Staged:
    """A ``Transport`` through buckets on the host, by a ``group`` of the host."""

    group: Group
    tensors_on: torch.device
    device: torch.device = HOST

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del deadline
        finish_queued(self.tensors_on)
        return self.group.broadcast(bucket, root=sender)


@dataclass(frozen=True, slots=True)
class Ipc:
    """A ``Transport`` by copies within a device; its ``group`` of the host exchanges the handles.

    Each message is complete when ``post`` returns.
    """

    group: Group
    device: torch.device
    rank: int

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        finish_queued(self.device)
        handle = reduce_tensor(bucket) if self.rank == sender else None
        handles = self.group.gather(handle, deadline)
        if self.rank != sender:
            rebuild, arguments = handles[self.group.members.index(sender)]
            bucket.copy_(rebuild(*arguments))
            finish_queued(self.device)
        self.group.gather(None, deadline)  # the sender's bucket is free again
        return Done()


@dataclass(frozen=True, slots=True)
class Done:
    """A ``Pending`` message that is complete."""

    def wait(self, deadline: Deadline) -> None:
        del deadline


def finish_queued(device: torch.device) -> None:
    """Wait until the current stream of ``device`` has done its queued work."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


class FormGroup(Protocol):
    """A function that forms a group of a link."""

    def __call__(
        self,
        purpose: str,
        members: tuple[int, ...],
        *,
        device: torch.device,
        across: bool = False,
    ) -> Group:
        """Form a group of ``members``, by FlagCX if ``across``; ``purpose`` is unique."""
        ...


def make_transports(
    routes: Sequence[Route],
    endpoints: Sequence[Endpoint],
    *,
    wanted: Sequence[TransportKind | None],
    rank: int,
    device: torch.device,
    roles: Sequence[str],
    form: FormGroup,
) -> dict[Route, Transport]:
    """Make the transports of this process's routes. All processes of the link do so together.

    Args:
        routes: all routes of the link.
        endpoints: the endpoints of all processes, by rank.
        wanted: the transport that each process wants for the routes on which it sends.
        rank: the rank of this process.
        device: the device on which its messages begin and end.
        roles: the names of all processes in logs.

    Raises:
        UserError: in all processes, if a wanted transport does not exist.
        GroupError: other processes do not join.
    """
    choices = {
        route: choose_route(route, endpoints, wanted=wanted[route.sender]) for route in routes
    }
    groups = _Groups(rank, device, form=form)
    transports: dict[Route, Transport] = {}
    for route, choice in choices.items():
        if rank not in route.members:
            continue
        transports[route] = _transport(route, choice, groups=groups)
        if rank == route.sender:
            receivers = ", ".join(roles[receiver] for receiver in route.receivers)
            level = logging.WARNING if choice.first.is_surprising else logging.INFO
            logger.log(level, "weights go to %s: %s", receivers, choice)
    return transports


class _Groups:
    """The groups of one process.

    Routes with the same members share a group. The two directions of a pair do not: the messages of
    a group follow each other, while the two directions of a connection are independent.
    """

    def __init__(self, rank: int, device: torch.device, *, form: FormGroup) -> None:
        self.rank = rank
        self._device = device
        self._form = form
        self._groups: dict[str, Group] = {}

    def transport(
        self, kind: TransportKind, members: tuple[int, ...], *, purpose: str = ""
    ) -> Transport:
        """Return the transport among ``members``."""
        own, across = self._device, kind is TransportKind.FLAGCX
        device = own if across or kind is TransportKind.COLLECTIVE else HOST
        label = kind.value if across else "device" if device.type != "cpu" else "host"
        key = f"{purpose}{label}/{'-'.join(map(str, members))}"
        if key not in self._groups:
            self._groups[key] = self._form(key, members, device=device, across=across)
        group = self._groups[key]
        if kind is TransportKind.STAGED:
            return Staged(group, own)
        if kind is TransportKind.IPC:
            return Ipc(group, own, self.rank)
        return Collective(group, own)


def _transport(route: Route, choice: RouteChoice, *, groups: _Groups) -> Transport:
    kind, rank = choice.first.kind, groups.rank
    if choice.relay is None or choice.inside is None:
        purpose = f"from {route.sender}/" if len(route.members) == 2 else ""
        return groups.transport(kind, route.members, purpose=purpose)
    pair = tuple(sorted((route.sender, choice.relay)))
    if rank == route.sender:
        return groups.transport(kind, pair)
    # Each relay has a group of its own: it passes messages on after the others begin to wait for
    # them, and all members must see the messages of a group in one order.
    purpose = f"relay {choice.relay}/"
    inside = groups.transport(choice.inside.kind, route.receivers, purpose=purpose)
    if rank != choice.relay:
        return FromRelay(inside, choice.relay)
    return Relay(groups.transport(kind, pair), inside, rank)


@dataclass(frozen=True, slots=True)
class FromRelay:
    """The ``Transport`` of a receiver that gets messages from the relay."""

    inside: Transport
    relay: int

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del sender
        return self.inside.post(bucket, sender=self.relay, deadline=deadline)


@dataclass(frozen=True, slots=True)
class Relay:
    """The ``Transport`` of the relay, which passes a message on when it is waited for."""

    crossing: Transport
    inside: Transport
    rank: int

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        arriving = bucket
        if self.crossing.device != bucket.device:
            arriving = torch.empty_like(bucket, device=self.crossing.device)
        pending = self.crossing.post(arriving, sender=sender, deadline=deadline)
        return _RelayedMessage(self, pending, arriving, bucket)


@dataclass(frozen=True, slots=True)
class _RelayedMessage:
    relay: Relay
    pending: Pending
    arriving: Tensor
    bucket: Tensor

    def wait(self, deadline: Deadline) -> None:
        self.pending.wait(deadline)
        if self.arriving is not self.bucket:
            self.bucket.copy_(self.arriving)
        relay = self.relay
        relay.inside.post(self.bucket, sender=relay.rank, deadline=deadline).wait(deadline)
