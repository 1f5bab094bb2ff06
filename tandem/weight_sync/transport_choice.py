# SPDX-License-Identifier: Apache-2.0
"""The choice of the transport of every route, with its reason, from the endpoints of all.

Every process computes the same choice for every route, so an error is the same in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.comm.flagcx import find_obstacle, vendors_with_one_rank
from tandem.errors import UserError
from tandem.weight_sync.plan import Route

_KEY = "pools.transport"
_REMEDY = f"Set {_KEY}=auto."


class TransportKind(Enum):
    """The kinds of transport between processes."""

    COLLECTIVE = "collective"
    """A broadcast by the native library of the devices."""
    IPC = "ipc"
    """The receivers map the sender's bucket, which lies on the same device."""
    FLAGCX = "flagcx"
    """A broadcast by FlagCX, which connects devices of several vendors."""
    STAGED = "staged"
    """A broadcast of buckets in host memory."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The place of a process's tensors.

    Attributes:
        device_type: torch's name of the device type.
        device_id: an id that is unique among all devices of the type, on all nodes.
        platform: the platform, whose devices share a native library; "" if unknown.
        maps_peers: whether a process can map the memory of another on the same device.
        flagcx: FlagCX's name of the vendor, "" without its library.
    """

    device_type: str
    device_id: str
    platform: str = ""
    maps_peers: bool = False
    flagcx: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A transport and the reason for it. Users are warned if ``is_surprising``."""

    kind: TransportKind
    reason: str
    is_surprising: bool = False


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """The transports of a route.

    Attributes:
        first: the transport from the sender to all receivers, or to the relay alone.
        relay: the receiver that passes messages on to the others, None without a relay.
        inside: the transport from the relay to the other receivers.
    """

    first: Choice
    relay: int | None = None
    inside: Choice | None = None

    def __str__(self) -> str:
        text = f"{self.first.kind.value}, {self.first.reason}"
        if self.inside is None:
            return text
        return f"{text}; rank {self.relay} passes them on: {self.inside.kind.value}"


def choose_route(
    route: Route, endpoints: Sequence[Endpoint], *, wanted: TransportKind | None = None
) -> RouteChoice:
    """Choose how a route's messages travel. They cross to another platform once and fan out there.

    Args:
        endpoints: the endpoints of all processes, by rank.
        wanted: the transport to use instead of the fastest one: between the platforms if the route
            crosses to another one, else among its devices.

    Raises:
        UserError: the wanted transport does not exist on this route.
    """
    ends = [endpoints[rank] for rank in route.members]
    if len({end.platform for end in ends}) == 1:
        return RouteChoice(choose_transport(ends, wanted))
    first = _choose_crossing(ends, wanted)
    if first.kind is not TransportKind.STAGED or len(route.receivers) == 1:
        return RouteChoice(first)
    relay = route.receivers[route.sender % len(route.receivers)]
    inside = choose_transport([endpoints[rank] for rank in route.receivers])
    return RouteChoice(first, relay, inside)


def choose_transport(endpoints: Sequence[Endpoint], wanted: TransportKind | None = None) -> Choice:
    """Choose the wanted transport between processes of one platform, or the fastest one.

    Raises:
        UserError: the wanted one does not exist between them.
    """
    types = {endpoint.device_type for endpoint in endpoints}
    devices = {endpoint.device_id for endpoint in endpoints}
    possible = [Choice(TransportKind.STAGED, f"tensors lie on {' and '.join(sorted(types))}")]
    if types == {"cpu"}:
        fastest = Choice(TransportKind.COLLECTIVE, "all tensors lie in host memory")
        possible = [fastest, *possible]
    elif len(types) == 1 and len(devices) == len(endpoints):
        fastest = Choice(TransportKind.COLLECTIVE, f"each process has a {min(types)} device")
        possible = [fastest, *possible]
    elif all(endpoint.maps_peers for endpoint in endpoints) and len(devices) == 1:
        fastest = Choice(TransportKind.IPC, f"the processes share a {min(types)} device")
        possible = [fastest, *possible]
    if all(endpoint.flagcx for endpoint in endpoints):
        possible.append(Choice(TransportKind.FLAGCX, "all processes have it"))
    return _take(possible, wanted, between=" and ".join(sorted(types)))


def _choose_crossing(ends: Sequence[Endpoint], wanted: TransportKind | None) -> Choice:
    platforms = list(dict.fromkeys(end.platform for end in ends))
    names = " and ".join(platforms)
    obstacle = _flagcx_obstacle(ends)
    if obstacle and wanted is TransportKind.FLAGCX:
        raise UserError(_KEY, "flagcx", rule=f"{names}: {obstacle}", remedy=_REMEDY)
    if obstacle:
        reason = f"between {names} only the hosts connect ({obstacle})"
        return _take([Choice(TransportKind.STAGED, reason)], wanted, between=names)
    flagcx = Choice(TransportKind.FLAGCX, f"it connects {names}")
    single = " and ".join(vendors_with_one_rank([end.flagcx for end in ends]))
    why = f": with one rank of {single}, FlagCX also goes through the hosts" if single else ""
    staged = Choice(TransportKind.STAGED, f"between {names}{why}", is_surprising=bool(single))
    return _take([staged, flagcx] if single else [flagcx, staged], wanted, between=names)


def _flagcx_obstacle(ends: Sequence[Endpoint]) -> str:
    """Return why FlagCX cannot connect these processes, "" if it can."""
    without = next((end for end in ends if not end.flagcx), None)
    if without is not None:
        return f"{without.platform} has no FlagCX"
    return find_obstacle([end.flagcx for end in ends])


def _take(possible: Sequence[Choice], wanted: TransportKind | None, *, between: str) -> Choice:
    if wanted is None:
        return possible[0]
    if wanted in [choice.kind for choice in possible]:
        return Choice(wanted, "as configured")
    kinds = " and ".join(choice.kind.value for choice in possible)
    raise UserError(
        _KEY, wanted.value, rule=f"between {between} there is only {kinds}", remedy=_REMEDY
    )
