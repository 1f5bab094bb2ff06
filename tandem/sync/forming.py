# SPDX-License-Identifier: Apache-2.0
"""What the processes of a link settle before the first transfer: layouts, plan, transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group
from tandem.sync.failure import FirstFailure, SyncError
from tandem.sync.plan import ALIGNMENT, Layout, Plan, Route, make_plan
from tandem.sync.transport import (
    Collective,
    Endpoint,
    Ipc,
    Staged,
    Transport,
    Way,
    choose_way,
    endpoint_of,
)
from tandem.types import HeldSlice

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


def _nothing() -> Sequence[HeldSlice]:
    return ()


@dataclass(frozen=True, slots=True)
class LinkTensors:
    """What a process sends and what it receives into. Asked for again at each transfer: the same
    slices each time, wherever their storage is by then."""

    sends: Callable[[], Sequence[HeldSlice]] = _nothing
    receives: Callable[[], Sequence[HeldSlice]] = _nothing


@dataclass(frozen=True, slots=True)
class LinkPlace:
    """A process's place in a link.

    Attributes:
        name: of the link, the same in all its processes; unique in the store.
        rank, size: its number, and how many there are.
        role: what errors call it, such as ``trainer 0``.
        device: where its tensors lie.
    """

    name: str
    rank: int
    size: int
    role: str
    device: torch.device


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How weights move.

    Attributes:
        send_bucket_bytes: of each of a sender's two buckets.
        receive_bucket_bytes: of each of a receiver's two buckets.
        timeout_s: bounds forming the link, and each transfer.
        double_buffered: a receiver takes a version into a second copy of the weights, and replaces
            the first with it when it is whole. Otherwise nobody uses them during a transfer.
        way: the transport, None for the fastest there is.
    """

    send_bucket_bytes: int
    receive_bucket_bytes: int
    timeout_s: float
    double_buffered: bool = False
    way: Way | None = None

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
    way: Way | None
    failure: str


@dataclass(frozen=True, slots=True)
class FormedLink:
    """All that transfers of one generation of a link share.

    Attributes:
        control: a group of the host with all processes.
        roles: what errors call each process.
        layout: of this process.
        message_bytes: the most that a message has.
        transports: for each route of this process.
    """

    control: Group
    roles: tuple[str, ...]
    layout: Layout
    plan: Plan
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
        endpoint=endpoint_of(place.device),
        message_bytes=settings.message_bytes,
        way=settings.way,
        failure=failure.cause,
    )


class FormGroup(Protocol):
    """Forms a group of this generation of the link."""

    def __call__(self, purpose: str, members: tuple[int, ...], *, device: torch.device) -> Group:
        """``purpose`` is unique within the generation."""
        ...


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
    plan = make_plan([hello.layout for hello in hellos], message_bytes=message_bytes)
    return FormedLink(
        control=control,
        roles=tuple(hello.role for hello in hellos),
        layout=hellos[place.rank].layout,
        plan=plan,
        message_bytes=message_bytes,
        transports=_make_transports(plan, hellos, place=place, form=form),
    )


def _make_transports(
    plan: Plan, hellos: Sequence[Hello], *, place: LinkPlace, form: FormGroup
) -> dict[Route, Transport]:
    """For the routes of this process; those with the same members share a group."""
    groups: dict[str, Group] = {}
    transports: dict[Route, Transport] = {}
    choices = {  # of all routes, so that a mistake is found in all processes
        route: choose_way(
            [hellos[rank].endpoint for rank in route.members], hellos[route.sender].way
        )
        for route in plan.routes
    }
    for route, choice in choices.items():
        if place.rank not in route.members:
            continue
        device = place.device if choice.way is Way.COLLECTIVE else HOST
        purpose = f"{device.type}/{'-'.join(map(str, route.members))}"
        if purpose not in groups:
            groups[purpose] = form(purpose, route.members, device=device)
        transports[route] = _transport(choice.way, groups[purpose], place=place)
        if place.rank == route.sender:
            receivers = ", ".join(hellos[rank].role for rank in route.receivers)
            logger.info("weights go to %s: %s, %s", receivers, choice.way.value, choice.reason)
    return transports


def _transport(way: Way, group: Group, *, place: LinkPlace) -> Transport:
    if way is Way.COLLECTIVE:
        return Collective(group, place.device)
    if way is Way.STAGED:
        return Staged(group, place.device)
    return Ipc(group, place.device, place.rank)
