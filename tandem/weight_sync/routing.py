# SPDX-License-Identifier: Apache-2.0
"""The transports of one process of a link, route by route; see ``ways`` for how they are chosen.

Where a route has a relay, the relay gets each message from the sender and passes it on with the
native library of its platform. Both happen within the transport: who packs and loads does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, Pending
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport import Collective, Ipc, Staged, Transport
from tandem.weight_sync.transport_choice import Endpoint, Path, Way, choose_path

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


class FormGroup(Protocol):
    """Forms a group of this generation of a link."""

    def __call__(
        self,
        purpose: str,
        members: tuple[int, ...],
        *,
        device: torch.device,
        across: bool = False,
    ) -> Group:
        """``purpose`` is unique within the generation; ``across``: by FlagCX."""
        ...


@dataclass(frozen=True, slots=True)
class Station:
    """A process of a link: its rank, where its messages begin and end, what errors call it."""

    rank: int
    device: torch.device
    roles: Sequence[str]


def make_transports(
    routes: Sequence[Route],
    endpoints: Sequence[Endpoint],
    *,
    wanted: Sequence[Way | None],
    station: Station,
    form: FormGroup,
) -> dict[Route, Transport]:
    """For the routes of this process; every process of the link makes its own at the same time.

    Args:
        routes: all of the link.
        endpoints: of all processes.
        wanted: by each of them, for the routes that it sends along.

    Raises:
        UserError: in all processes, if the wanted way does not exist.
        GroupError: others do not come.
    """
    paths = {route: choose_path(route, endpoints, wanted=wanted[route.sender]) for route in routes}
    groups = _Groups(station, form)
    transports: dict[Route, Transport] = {}
    for route, path in paths.items():
        if station.rank not in route.members:
            continue
        transports[route] = _transport(route, path, groups=groups)
        if station.rank == route.sender:
            receivers = ", ".join(station.roles[rank] for rank in route.receivers)
            level = logging.WARNING if path.choice.is_surprising else logging.INFO
            logger.log(level, "weights go to %s: %s", receivers, path)
    return transports


class _Groups:
    """Those of one process. Routes with the same members share one, but the two directions of a
    pair: messages of a group follow each other, and each way of a connection is as fast alone."""

    def __init__(self, station: Station, form: FormGroup) -> None:
        self.station = station
        self._form = form
        self._groups: dict[str, Group] = {}

    def transport(self, way: Way, members: tuple[int, ...], *, purpose: str = "") -> Transport:
        """The way among ``members``."""
        own = self.station.device
        device = own if way in (Way.COLLECTIVE, Way.FLAGCX) else HOST
        kind = way.value if way is Way.FLAGCX else "device" if device.type != "cpu" else "host"
        key = f"{purpose}{kind}/{'-'.join(map(str, members))}"
        if key not in self._groups:
            across = way is Way.FLAGCX
            self._groups[key] = self._form(key, members, device=device, across=across)
        group = self._groups[key]
        if way is Way.STAGED:
            return Staged(group, own)
        if way is Way.IPC:
            return Ipc(group, own, self.station.rank)
        return Collective(group, own)


def _transport(route: Route, path: Path, *, groups: _Groups) -> Transport:
    way, rank = path.choice.way, groups.station.rank
    if path.relay is None or path.inside is None:
        purpose = f"from {route.sender}/" if len(route.members) == 2 else ""
        return groups.transport(way, route.members, purpose=purpose)
    pair = tuple(sorted((route.sender, path.relay)))
    if rank == route.sender:
        return groups.transport(way, pair)
    # A group of each relay: it passes messages on later than the others begin to wait for them, and
    # all members must see the messages of a group in one order.
    purpose = f"relay {path.relay}/"
    inside = groups.transport(path.inside.way, route.receivers, purpose=purpose)
    if rank != path.relay:
        return PassedOn(inside, path.relay)
    return Relayed(groups.transport(way, pair), inside, path.relay)


@dataclass(frozen=True, slots=True)
class PassedOn:
    """Implements ``Transport`` in a receiver that gets messages from the relay."""

    inside: Transport
    relay: int

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del sender
        return self.inside.post(bucket, sender=self.relay, deadline=deadline)


@dataclass(frozen=True, slots=True)
class Relayed:
    """Implements ``Transport`` in the relay. A message is passed on when it is waited for."""

    crossing: Transport
    inside: Transport
    relay: int

    @property
    def device(self) -> torch.device:
        return self.inside.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        arriving = bucket
        if self.crossing.device != bucket.device:
            arriving = torch.empty_like(bucket, device=self.crossing.device)
        pending = self.crossing.post(arriving, sender=sender, deadline=deadline)
        return _Relaying(self, pending, arriving, bucket)


@dataclass(frozen=True, slots=True)
class _Relaying:
    transport: Relayed
    pending: Pending
    arriving: Tensor
    bucket: Tensor

    def wait(self, deadline: Deadline) -> None:
        self.pending.wait(deadline)
        if self.arriving is not self.bucket:
            self.bucket.copy_(self.arriving)
        transport = self.transport
        passing = transport.inside.post(self.bucket, sender=transport.relay, deadline=deadline)
        passing.wait(deadline)
