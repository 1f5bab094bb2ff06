# SPDX-License-Identifier: Apache-2.0
"""FlagCX groups, whose members may have devices of different vendors.

FlagCX's calls may block forever if a peer is gone. Each group therefore makes them in its own
thread, waits for it with a deadline, and abandons it afterwards. On a device, broadcasts run on a
stream of the group. ``weight_sync`` decides when FlagCX is used; ``flagcx_plugin`` makes it a
backend of torch.distributed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from tandem.comm.deadline import POLL_S, Deadline, GroupError
from tandem.comm.flagcx_library import FlagcxLibrary
from tandem.comm.group import Group, GroupPlace, Pending, wait_for_device
from tandem.comm.thread import CallingThread
from tandem.errors import UserError

logger = logging.getLogger(__name__)

StreamHandle = Callable[[Any], int]
"""A function from a stream of a platform's device module to its handle in the vendor's library."""

_FAREWELL_S = 2.0
"""The time that a leaving member waits for the others: leaving is collective in FlagCX."""
_PROOF_BYTES = 255
_ALONE = "ASCEND"
"""The vendor that FlagCX cannot combine with others."""


def find_obstacle(vendors: Sequence[str]) -> str:
    """Return why FlagCX cannot connect ranks of these vendors in this order; "" if it can.

    Example:
        >>> find_obstacle(["NVIDIA", "NVIDIA", "MUSA"])
        ''
        >>> find_obstacle(["NVIDIA", "MUSA", "NVIDIA"])
        'the ranks of one vendor must follow each other, and these are NVIDIA, MUSA, NVIDIA'
    """
    if len([vendor for vendor, _ in groupby(vendors)]) > len(set(vendors)):
        # FlagCX would silently number the ranks wrongly.
        order = ", ".join(vendors)
        return f"the ranks of one vendor must follow each other, and these are {order}"
    if _ALONE in vendors and len(set(vendors)) > 1:
        others = " and ".join(sorted(set(vendors) - {_ALONE}))
        return f"FlagCX does not connect {_ALONE} with {others}"
    return ""


def vendors_with_one_rank(vendors: Sequence[str]) -> list[str]:
    """Return the vendors that make FlagCX send through the host in a group of several vendors.

    Example:
        >>> vendors_with_one_rank(["NVIDIA", "MUSA", "MUSA"])
        ['NVIDIA']
    """
    names = set(vendors)
    return sorted(name for name in names if vendors.count(name) == 1) if len(names) > 1 else []


def form_flagcx_group(
    store: Store, place: GroupPlace, *, library: FlagcxLibrary, stream_handle: StreamHandle
) -> Group:
    """Form a group, as ``form_group`` does. Block until all members are connected.

    Args:
        library: FlagCX's build for this process's vendor.
        stream_handle: the function of this process's platform; not called on the host.

    Raises:
        GroupError: not all members connected in time, or the library failed in one of them.
        UserError: FlagCX cannot connect the members; raised in all of them.
    """
    stream = None if place.device.type == "cpu" else _DeviceStream(place.device, stream_handle)
    is_first = place.rank == place.members[0]
    hello = _make_hello(library, stream, is_first=is_first)
    store = PrefixStore(place.name, store)
    hellos = _meet(store, place, hello=hello, stage="hello")
    _check_members(hellos, place)
    if is_first:
        _warn_of_single_ranks(place, [hello.vendor for hello in hellos])
    thread = CallingThread(f"flagcx {place.name}")
    unique_id = bytes.fromhex(hellos[0].unique_id)
    connected = thread.submit(
        lambda: _Communicator(library, place, unique_id=unique_id, stream=stream)
    )
    if not wait([connected], timeout=place.timeout_s).done:
        connected.add_done_callback(_break_off_late)
        thread.finish()
        raise GroupError(f"group {place.name}: not all took part within {place.timeout_s:g} s")
    communicator = connected.result()
    group = _FlagcxGroup(place, thread=thread, communicator=communicator, stream=stream)
    if not communicator.is_homogeneous:
        _prove(store, place, group=group)
    return group


@dataclass(frozen=True, slots=True)
class _Hello:
    """The first message of a member. Only the first member sends a ``unique_id`` (hexadecimal)."""

    vendor: str = ""
    abi: str = ""
    unique_id: str = ""
    failure: str = ""


def _make_hello(library: FlagcxLibrary, stream: _DeviceStream | None, *, is_first: bool) -> _Hello:
    """Return this member's message, which reports a failure instead of raising it."""
    try:
        if stream:
            stream.handle()
        unique_id = library.make_id().hex() if is_first else ""
        return _Hello(vendor=library.vendor(), abi=library.abi.value, unique_id=unique_id)
    except (GroupError, UserError) as error:
        return _Hello(failure=str(error))


def _meet(store: Store, place: GroupPlace, *, hello: _Hello, stage: str) -> list[_Hello]:
    """Exchange messages through the store, and return them in the order of the members."""
    keys = [f"flagcx/{stage}/{rank}" for rank in place.members]
    store.set(f"flagcx/{stage}/{place.rank}", json.dumps(asdict(hello)))
    try:
        store.wait(keys, timedelta(seconds=place.timeout_s))
    except RuntimeError as error:
        absent = [
            rank for rank, key in zip(place.members, keys, strict=True) if not _has(store, key)
        ]
        raise GroupError(
            f"group {place.name}: no answer from ranks {absent} within {place.timeout_s:g} s"
        ) from error
    return [_Hello(**json.loads(store.get(key))) for key in keys]


def _has(store: Store, key: str) -> bool:
    try:
        return store.check([key])
    except RuntimeError:  # the store is gone, and all members with it
        return False


def _check_members(hellos: Sequence[_Hello], place: GroupPlace) -> None:
    for rank, hello in zip(place.members, hellos, strict=True):
        if hello.failure:
            raise GroupError(f"group {place.name}: rank {rank}: {hello.failure}")
    if len({hello.abi for hello in hellos}) > 1:
        versions = ", ".join(
            f"rank {rank} {hello.abi}" for rank, hello in zip(place.members, hellos, strict=True)
        )
        raise UserError(
            "flagcx",
            place.name,
            rule=f"the versions differ ({versions})",
            remedy="Install the same version of FlagCX on all nodes.",
        )
    obstacle = find_obstacle([hello.vendor for hello in hellos])
    if obstacle:
        raise UserError(
            "flagcx", place.name, rule=obstacle, remedy="Use the host-staged transport."
        )


def _warn_of_single_ranks(place: GroupPlace, vendors: Sequence[str]) -> None:
    alone = vendors_with_one_rank(vendors)
    if alone:
        logger.warning(
            "group %s: FlagCX goes through the host because %s has only one rank",
            place.name,
            " and ".join(alone),
        )


def _break_off_late(connected: Future[_Communicator]) -> None:
    """Leave a group that was connected after its deadline; runs in the thread that connected it."""
    if connected.exception() is None:
        connected.result().break_off()


def _prove(store: Store, place: GroupPlace, *, group: Group) -> None:
    """Broadcast known bytes and compare them at every member.

    From version 0.13 on, broadcasts through the host silently deliver the bytes after the sender's
    buffer.
    """
    deadline = Deadline(place.timeout_s, store=store, key="flagcx/failure")
    known = torch.arange(_PROOF_BYTES, dtype=torch.uint8) + 1
    first = place.members[0]
    bucket = (known if place.rank == first else torch.zeros_like(known)).to(place.device)
    group.broadcast(bucket, root=first).wait(deadline)
    if place.device.type != "cpu":
        wait_for_device(torch.accelerator.current_stream(place.device), deadline)
    failure = "" if torch.equal(bucket.cpu(), known) else "wrong"
    answers = _meet(store, place, hello=_Hello(failure=failure), stage="proof")
    wrong = [r for r, answer in zip(place.members, answers, strict=True) if answer.failure]
    if wrong:
        group.abandon()
        raise UserError(
            "flagcx",
            place.name,
            rule=f"a test broadcast arrived corrupted at ranks {wrong}",
            remedy="Use the host-staged transport, or at least two ranks of each vendor.",
        )


class _DeviceStream:
    """The stream of a group's broadcasts, separate from the streams of its callers."""

    def __init__(self, device: torch.device, stream_handle: StreamHandle) -> None:
        self._device = device
        # The vendor's streams and events, because torch's generic ones do not wait for them.
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._stream_handle = stream_handle

    def handle(self) -> int:
        """Return the vendor's handle. Raise GroupError if the platform has none."""
        kind = f"{type(self._stream).__name__} of {self._device}"
        try:
            handle = self._stream_handle(self._stream)
        except (AttributeError, TypeError) as error:
            raise GroupError(f"{kind}: its platform does not support such a stream") from error
        if not isinstance(handle, int) or handle == 0:  # 0 is the default stream
            raise GroupError(f"{kind}: its platform returns {handle!r} as the stream's handle")
        return handle

    def follow_current(self) -> None:
        """Order later work after all work queued on the caller's current stream."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def finish(self) -> None:
        """Wait until all queued work is done."""
        self._stream.synchronize()

    def record(self) -> torch.Event:
        """Return an event after all queued work."""
        return self._stream.record_event()

    def lead_current(self, event: torch.Event) -> None:
        """Order later work of the caller's current stream after the event."""
        self._module.current_stream(self._device).wait_event(event)


class _Communicator:
    """A member's FlagCX communicator. Only one thread may use it."""

    def __init__(
        self,
        library: FlagcxLibrary,
        place: GroupPlace,
        *,
        unique_id: bytes,
        stream: _DeviceStream | None,
    ) -> None:
        """Connect. Block until all members are connected."""
        self._library = library
        library.use_device(place.device.index or 0)
        rank = place.members.index(place.rank)
        self._communicator = library.connect(unique_id, rank=rank, size=len(place.members))
        self.is_homogeneous = library.is_homogeneous(self._communicator)
        self._stream = library.copy_stream(stream.handle()) if stream else 0

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Queue a broadcast on the group's stream."""
        self._library.broadcast(
            self._communicator,
            tensor.data_ptr(),
            num_bytes=tensor.nbytes,
            root=root,
            stream=self._stream,
        )

    def leave(self) -> None:
        """Leave the group. Block until all members leave."""
        self._free_stream()
        self._library.destroy(self._communicator)

    def break_off(self) -> None:
        """Leave without waiting for peers."""
        self._free_stream()
        if self.is_homogeneous:  # FlagCX cannot abort others: their memory stays allocated
            self._library.abort(self._communicator)

    def _free_stream(self) -> None:
        if self._stream:
            self._library.free_stream(self._stream)
            self._stream = 0


class _FlagcxGroup:
    """A ``Group`` over a FlagCX communicator."""

    def __init__(
        self,
        place: GroupPlace,
        *,
        thread: CallingThread,
        communicator: _Communicator,
        stream: _DeviceStream | None,
    ) -> None:
        self.members = place.members
        self._place = place
        self._thread: CallingThread | None = thread
        self._communicator = communicator
        self._stream = stream

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        if self._thread is None:
            raise GroupError("the group is closed")
        if tensor.device.type != self._place.device.type or not tensor.is_contiguous():
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} on {tensor.device} must be contiguous "
                f"and on {self._place.device}"
            )
        stream, communicator = self._stream, self._communicator
        if stream:
            stream.follow_current()

        def call() -> torch.Event | None:
            if stream and not communicator.is_homogeneous:
                stream.finish()  # transfers through the host ignore the order of streams
            if tensor.nbytes:  # not all transports of FlagCX accept empty tensors
                communicator.broadcast(tensor, self.members.index(root))
            return stream.record() if stream else None

        return _Broadcast(self._thread.submit(call), stream)

    def gather(self, value: Any, deadline: Deadline) -> list[Any]:
        del value, deadline
        raise GroupError("FlagCX does not gather values: use a group of the host")

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        left = thread.submit(self._communicator.leave)
        thread.finish()
        failure = left.exception() if wait([left], timeout=_FAREWELL_S).done else "others have not"
        if failure:  # only memory is lost
            logger.warning("group %s: could not be left: %s", self._place.name, failure)

    def abandon(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.drop()
        thread.submit(self._communicator.break_off)
        thread.finish()


@dataclass(frozen=True, slots=True)
class _Broadcast:
    called: Future[torch.Event | None]
    stream: _DeviceStream | None

    def wait(self, deadline: Deadline) -> None:
        while not wait([self.called], timeout=POLL_S).done:
            deadline.check()
        event = self.called.result()
        if self.stream and event:
            self.stream.lead_current(event)
