# SPDX-License-Identifier: Apache-2.0
"""Which way bytes take between processes, as a pure function of what each says of itself, and why.

Every process computes the same answer for every route, so that a mistake is the same error in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tandem.comm.flagcx import find_obstacle, vendors_with_one_rank
from tandem.errors import UserError
from tandem.weight_sync.plan import Route

_KEY = "pools.transport"


class Way(Enum):
    """How bytes travel between processes."""

    COLLECTIVE = "collective"
    """A broadcast by the library that is native to the devices."""
    IPC = "ipc"
    """The receivers map the sender's bucket, which lies on the same device."""
    FLAGCX = "flagcx"
    """A broadcast by FlagCX, which connects devices of several vendors."""
    STAGED = "staged"
    """Through buckets in the memory of the hosts."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process has its tensors.

    Attributes:
        device_type: as torch calls it.
        device_id: tells devices of one type apart, anywhere.
        platform: those of one platform share a native library; "" if nobody said.
        maps_peers: whether a process can map the memory of another on the same device.
        flagcx: the vendor, as FlagCX calls it; "" where its library is not.
    """

    device_type: str
    device_id: str
    platform: str = ""
    maps_peers: bool = False
    flagcx: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, and why it was taken. ``is_surprising``: users expect another."""

    way: Way
    reason: str
    is_surprising: bool = False


@dataclass(frozen=True, slots=True)
class Path:
    """How the messages of a route go.

    Attributes:
        choice: from the sender to all receivers, or to the relay alone.
        relay: the receiver that passes them on to the others, None if there is none.
        inside: how it does.
    """

    choice: Choice
    relay: int | None = None
    inside: Choice | None = None

    def __str__(self) -> str:
        text = f"{self.choice.way.value}, {self.choice.reason}"
        if self.inside is None:
            return text
        return f"{text}; rank {self.relay} passes them on: {self.inside.way.value}"


def choose_path(route: Route, endpoints: Sequence[Endpoint], *, wanted: Way | None = None) -> Path:
    """How a route goes. What crosses to another platform does so once, and fans out there.

    Args:
        endpoints: of all processes, by rank.
        wanted: takes the place of the fastest way: between platforms if the route crosses to
            another, else among the devices of one.

    Raises:
        UserError: the wanted way does not exist on this route.
    """
    ends = [endpoints[rank] for rank in route.members]
    if len({end.platform for end in ends}) == 1:
        return Path(choose_way(ends, wanted))
    choice = _choose_crossing(ends, wanted)
    if choice.way is not Way.STAGED or len(route.receivers) == 1:
        return Path(choice)
    relay = route.receivers[route.sender % len(route.receivers)]
    return Path(choice, relay, choose_way([endpoints[rank] for rank in route.receivers]))


def choose_way(endpoints: Sequence[Endpoint], wanted: Way | None = None) -> Choice:
    """The fastest way that exists between processes of one platform, or the wanted one.

    Raises:
        UserError: the wanted one does not exist between them.
    """
    types = {endpoint.device_type for endpoint in endpoints}
    devices = {endpoint.device_id for endpoint in endpoints}
    possible = [Choice(Way.STAGED, f"tensors lie on {' and '.join(sorted(types))}")]
    if types == {"cpu"}:
        possible = [Choice(Way.COLLECTIVE, "all tensors lie in host memory"), *possible]
    elif len(types) == 1 and len(devices) == len(endpoints):
        possible = [Choice(Way.COLLECTIVE, f"each process has a {min(types)} device"), *possible]
    elif all(endpoint.maps_peers for endpoint in endpoints) and len(devices) == 1:
        possible = [Choice(Way.IPC, f"the processes share a {min(types)} device"), *possible]
    if all(endpoint.flagcx for endpoint in endpoints):
        possible.append(Choice(Way.FLAGCX, "all have it"))
    return _take(possible, wanted, between=" and ".join(sorted(types)))


def _choose_crossing(ends: Sequence[Endpoint], wanted: Way | None) -> Choice:
    """Between platforms."""
    platforms = list(dict.fromkeys(end.platform for end in ends))
    names = " and ".join(platforms)
    obstacle = _flagcx_obstacle(ends)
    if obstacle and wanted is Way.FLAGCX:
        raise UserError(f"{_KEY}=flagcx: {names}: {obstacle}. Set {_KEY}=auto.")
    if obstacle:
        possible = [Choice(Way.STAGED, f"between {names} only the hosts connect ({obstacle})")]
        return _take(possible, wanted, between=names)
    flagcx = Choice(Way.FLAGCX, f"it connects {names}")
    alone = " and ".join(vendors_with_one_rank([end.flagcx for end in ends]))
    why = f": with one rank of {alone}, FlagCX goes through the hosts too" if alone else ""
    staged = Choice(Way.STAGED, f"between {names}{why}", is_surprising=bool(alone))
    return _take([staged, flagcx] if alone else [flagcx, staged], wanted, between=names)


def _flagcx_obstacle(ends: Sequence[Endpoint]) -> str:
    """Why FlagCX cannot connect these, "" if it can."""
    without = next((end for end in ends if not end.flagcx), None)
    if without is not None:
        return f"{without.platform} has no FlagCX"
    return find_obstacle([end.flagcx for end in ends])


def _take(possible: Sequence[Choice], wanted: Way | None, *, between: str) -> Choice:
    if wanted is None:
        return possible[0]
    if wanted in [choice.way for choice in possible]:
        return Choice(wanted, "as asked for")
    ways = " and ".join(choice.way.value for choice in possible)
    raise UserError(
        f"{_KEY}={wanted.value}: between {between} there is only {ways}. Set {_KEY}=auto."
    )
