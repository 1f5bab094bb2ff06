# SPDX-License-Identifier: Apache-2.0
"""The settings of a link, and the agreement of its processes on layouts, plan and transports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, GroupPlace
from tandem.platforms.record import CPU, Platform
from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.plan import (
    ALIGNMENT,
    Layout,
    Message,
    Plan,
    Route,
    SliceView,
    locate,
    make_plan,
)
from tandem.weight_sync.transport import HOST, FormGroup, Transport, make_transports
from tandem.weight_sync.transport_choice import Endpoint, TransportKind


def nothing() -> Sequence[HeldSlice]:
    """Return no slices, for a process that does not send or does not receive."""
    return ()


@dataclass(frozen=True, slots=True)
class LinkTensors:
    """Functions that list the tensors of a process; each transfer calls them again.

    Attributes:
        sends: lists the slices to send. They must be the same each time; their storage may move.
        receives: lists the slices to receive into, likewise.
        settle: returns once no computation uses the received slices; called before they change.
    """

    sends: Callable[[], Sequence[HeldSlice]] = nothing
    receives: Callable[[], Sequence[HeldSlice]] = nothing
    settle: Callable[[], object] = nothing


@dataclass(frozen=True, slots=True)
class FlagcxAccess:
    """FlagCX in this process: its name of the vendor, and the function that forms its groups."""

    vendor: str
    make_group: Callable[[Store, GroupPlace], Group]


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """A process's place in a link.

    Attributes:
        name: the name of the link, the same in all its processes; unique in the store.
        rank, size: the process's number, and the number of processes.
        role: the process's name in errors, such as ``trainer 0``.
        device: the device of its tensors.
        platform: the platform of this device.
        device_id: an id that is unique among the devices of its type, on all nodes; "" for the id
            of the device's driver.
        flagcx: FlagCX in this process, None without.
    """

    name: str
    rank: int
    size: int
    role: str
    device: torch.device
    platform: Platform = CPU
    device_id: str = ""
    flagcx: FlagcxAccess | None = None


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """The settings of a link.

    Attributes:
        send_bucket_bytes: the size of each of a sender's two buckets.
        receive_bucket_bytes: the size of each of a receiver's two buckets.
        timeout_s: the time limit for forming the link, and for each transfer.
        double_buffered: whether versions arrive in an additional copy.
        staged: whether whole copies of the weights are sent from host to host, while the devices
            go on.
        transport: the transport of every route; None for the fastest one of each route.
        roll_call_s: the time for which the survivors of a broken link wait for each other, to find
            out which processes are gone.
    """

    send_bucket_bytes: int
    receive_bucket_bytes: int
    timeout_s: float
    double_buffered: bool = False
    staged: bool = False
    transport: TransportKind | None = None
    roll_call_s: float = 3.0

    @property
    def num_copies(self) -> int:
        """The number of copies, besides the weights in use, in which versions arrive.

        If it is 0, versions arrive in the weights themselves, which are not in use meanwhile.
        """
        return int(self.staged) + int(self.double_buffered)

    @property
    def message_bytes(self) -> int:
        """The maximum size of a message, which fits into a bucket of either side."""
        return min(self.send_bucket_bytes, self.receive_bucket_bytes) // ALIGNMENT * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a process to all others."""

    role: str
    layout: Layout
    endpoint: Endpoint
    message_bytes: int
    num_copies: int
    transport: TransportKind | None
    failure: str


@dataclass(frozen=True, slots=True)
class FormedLink:
    """The agreement of a link's processes, which all transfers share.

    Attributes:
        control: a group of all processes, on the host.
        roles: the names of all processes in errors.
        layout: the layout of this process.
        sent, received: the messages of this process, in the order of the plan.
        views: the place of each of their segments, by number, in the slices of this process.
        local: the places in sent and in received slices of each region that it holds and needs.
        message_bytes: the maximum size of a message.
        transports: the transport of each route of this process.
    """

    control: Group
    roles: tuple[str, ...]
    layout: Layout
    plan: Plan
    sent: tuple[Message, ...]
    received: tuple[Message, ...]
    views: dict[int, SliceView]
    local: tuple[tuple[SliceView, SliceView], ...]
    message_bytes: int
    transports: dict[Route, Transport]


def list_slices(source: Callable[[], Sequence[HeldSlice]]) -> list[HeldSlice]:
    """Return the slices of ``source``.

    Raises:
        SyncError: a tensor does not have the shape and dtype of its spec.
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
    """Make a process's hello. A failure becomes part of it instead of being raised."""
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
        transport=settings.transport,
        failure=failure.cause,
    )


def _wire_device(place: LinkPlace, settings: LinkSettings) -> torch.device:
    """Return the device on which messages begin and end in this process."""
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


def _views(messages: Sequence[Message], specs: Sequence[SliceSpec]) -> dict[int, SliceView]:
    segments = [segment for message in messages for segment in message.segments]
    views = locate([segment.content for segment in segments], specs)
    return {segment.number: view for segment, view in zip(segments, views, strict=True)}


def form_link(
    place: LinkPlace,
    tensors: LinkTensors,
    *,
    settings: LinkSettings,
    form: FormGroup,
    deadline: Deadline,
) -> FormedLink:
    """Form the link together with all its other processes, which call this at the same time.

    Raises:
        GroupError: a process did not join, or is gone.
        SyncError: in all processes, if the layouts do not match or a process has failed.
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
                f"{local[0].name}: {hello.role} holds and needs it, so it must not receive it in a "
                "copy"
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
        views=_views(sent, layout.sends) | _views(received, layout.needs),
        local=tuple(zip(locate(local, layout.sends), locate(local, layout.needs), strict=True)),
        message_bytes=message_bytes,
        transports=make_transports(
            plan.routes,
            endpoints,
            wanted=[hello.transport for hello in hellos],
            rank=place.rank,
            device=_wire_device(place, settings),
            roles=roles,
            form=form,
        ),
    )
