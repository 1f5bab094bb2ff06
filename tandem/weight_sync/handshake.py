# SPDX-License-Identifier: Apache-2.0
"""What the processes of a link settle before the first transfer: layouts, plan, transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, GroupPlace
from tandem.platforms.record import CPU, Platform
from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.buckets import Location, locate
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.plan import ALIGNMENT, Layout, Message, Plan, Route, make_plan
from tandem.weight_sync.routing import HOST, FormGroup, Station, make_transports
from tandem.weight_sync.transport import Transport
from tandem.weight_sync.transport_choice import Endpoint, Way


def nothing() -> Sequence[HeldSlice]:
    """Of a process that does not send, or does not receive."""
    return ()


@dataclass(frozen=True, slots=True)
class LinkTensors:
    """What a process sends and what it receives into. Asked for again at each transfer: the same
    slices each time, wherever their storage is by then. ``settle`` returns once nothing is computed
    with what is received; it is called before that is replaced."""

    sends: Callable[[], Sequence[HeldSlice]] = nothing
    receives: Callable[[], Sequence[HeldSlice]] = nothing
    settle: Callable[[], object] = nothing


@dataclass(frozen=True, slots=True)
class FlagcxEnd:
    """FlagCX in this process: what it calls the vendor, and what forms its groups."""

    vendor: str
    make_group: Callable[[Store, GroupPlace], Group]


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """A process's place in a link.

    Attributes:
        name: of the link, the same in all its processes; unique in the store.
        rank, size: its number, and how many there are.
        role: what errors call it, such as ``trainer 0``.
        device: where its tensors lie.
        platform: of this device.
        device_id: tells it apart from all other devices of its type, on any node; "" asks the
            device's driver.
        flagcx: how this process reaches those of other platforms, if FlagCX is here.
    """

    name: str
    rank: int
    size: int
    role: str
    device: torch.device
    platform: Platform = CPU
    device_id: str = ""
    flagcx: FlagcxEnd | None = None


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How weights move.

    Attributes:
        send_bucket_bytes: of each of a sender's two buckets.
        receive_bucket_bytes: of each of a receiver's two buckets.
        timeout_s: bounds forming the link, and each transfer.
        double_buffered: versions arrive in one copy more than otherwise.
        staged: weights move from host to host, where a whole version is copied before it is sent
            and when it has been received; the devices go on meanwhile.
        way: the transport of every route, None for the fastest that each has.
        roll_call_s: how long the survivors of a broken link wait for each other, to tell who is
            gone.
    """

    send_bucket_bytes: int
    receive_bucket_bytes: int
    timeout_s: float
    double_buffered: bool = False
    staged: bool = False
    way: Way | None = None
    roll_call_s: float = 1.0

    @property
    def num_copies(self) -> int:
        """In how many copies beside the weights in use versions arrive; 0 if in these themselves,
        which nobody uses during a transfer then."""
        return int(self.staged) + int(self.double_buffered)

    @property
    def message_bytes(self) -> int:
        """The most that travels at once: what fits into a bucket of either side."""
        return min(self.send_bucket_bytes, self.receive_bucket_bytes) // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Hello:
    """What a process tells all others first."""

    role: str
    layout: Layout
    endpoint: Endpoint
    message_bytes: int
    num_copies: int
    way: Way | None
    failure: str


@dataclass(frozen=True, slots=True)
class FormedLink:
    """All that transfers of one generation of a link share.

    Attributes:
        control: a group of the host with all processes.
        roles: what errors call each process.
        layout: of this process.
        sent, received: the messages of this process, in the order of the plan.
        locations: of their pieces, by number: among what it sends, or receives.
        local: of what it both holds and needs, among the one and among the other.
        message_bytes: the most that a message has.
        transports: for each route of this process.
    """

    control: Group
    roles: tuple[str, ...]
    layout: Layout
    plan: Plan
    sent: tuple[Message, ...]
    received: tuple[Message, ...]
    locations: dict[int, Location]
    local: tuple[tuple[Location, Location], ...]
    message_bytes: int
    transports: dict[Route, Transport]


def list_slices(source: Callable[[], Sequence[HeldSlice]]) -> list[HeldSlice]:
    """Ask for slices.

    Raises:
        SyncError: a tensor is not what its spec says.
    """
    slices = list(source())
    for held in slices:
        spec, tensor = held.spec, held.tensor
        if (tuple(tensor.shape), tensor.dtype) != (spec.size, spec.dtype):
            raise SyncError(
                f"{spec.name}: its storage is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"its slice {spec.dtype} of shape {spec.size}"
            )
    return slices


def make_hello(place: LinkPlace, tensors: LinkTensors, *, settings: LinkSettings) -> Hello:
    """Never raises: a failure is part of what is told."""
    failure = FirstFailure()
    layout = Layout()
    with failure.noted("listing weights"):
        layout = Layout(
            sends=tuple(held.spec for held in list_slices(tensors.sends)),
            needs=tuple(held.spec for held in list_slices(tensors.receives)),
        )
    return Hello(
        role=f"{place.role} (rank {place.rank} of link {place.name})",
        layout=layout,
        endpoint=_endpoint(place, settings),
        message_bytes=settings.message_bytes,
        num_copies=settings.num_copies,
        way=settings.way,
        failure=failure.cause,
    )


def _wire_device(place: LinkPlace, settings: LinkSettings) -> torch.device:
    """Where messages begin and end in this process."""
    return HOST if settings.staged else place.device


def _endpoint(place: LinkPlace, settings: LinkSettings) -> Endpoint:
    device, platform = _wire_device(place, settings), place.platform
    if device.type == "cpu":
        return Endpoint("cpu", "", platform.name)
    return Endpoint(
        device.type,
        place.device_id or platform.device_uuid(device.index),
        platform.name,
        maps_peers=platform.maps_memory,
        flagcx=place.flagcx.vendor if place.flagcx is not None else "",
    )


def _locations(messages: Sequence[Message], specs: Sequence[SliceSpec]) -> dict[int, Location]:
    pieces = [piece for message in messages for piece in message.pieces]
    located = locate([piece.part for piece in pieces], specs)
    return {piece.number: location for piece, location in zip(pieces, located, strict=True)}


def form_link(
    place: LinkPlace,
    tensors: LinkTensors,
    *,
    settings: LinkSettings,
    form: FormGroup,
    deadline: Deadline,
) -> FormedLink:
    """Everybody calls this at the same time.

    Raises:
        GroupError: a process did not come, or went away.
        SyncError: in all processes, if the layouts do not match or one has failed.
    """
    control = form("control", tuple(range(place.size)), device=HOST)
    hellos: list[Hello] = control.gather(make_hello(place, tensors, settings=settings), deadline)
    for hello in hellos:
        if hello.failure:
            raise SyncError(f"{hello.role}: {hello.failure}")
    message_bytes = min(hello.message_bytes for hello in hellos)
    if message_bytes < ALIGNMENT:
        raise SyncError(f"buckets of {message_bytes} bytes: at least {ALIGNMENT} are needed")
    endpoints = [hello.endpoint for hello in hellos]
    plan = make_plan(
        [hello.layout for hello in hellos],
        message_bytes=message_bytes,
        islands=[endpoint.platform for endpoint in endpoints],
    )
    for hello, local in zip(hellos, plan.local, strict=True):
        if hello.num_copies and local:
            raise SyncError(
                f"{local[0].name}: {hello.role} holds and needs it, and is to receive it in a copy"
            )
    roles = tuple(hello.role for hello in hellos)
    layout, local = hellos[place.rank].layout, plan.local[place.rank]
    sent, received = plan.sent_by(place.rank), plan.received_by(place.rank)
    return FormedLink(
        control=control,
        roles=roles,
        layout=layout,
        plan=plan,
        sent=tuple(sent),
        received=tuple(received),
        locations=_locations(sent, layout.sends) | _locations(received, layout.needs),
        local=tuple(zip(locate(local, layout.sends), locate(local, layout.needs), strict=True)),
        message_bytes=message_bytes,
        transports=make_transports(
            plan.routes,
            endpoints,
            wanted=[hello.way for hello in hellos],
            station=Station(place.rank, _wire_device(place, settings), roles),
            form=form,
        ),
    )
