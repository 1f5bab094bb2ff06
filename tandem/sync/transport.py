# SPDX-License-Identifier: Apache-2.0
"""How a message gets from the sender's bucket into the receivers': which way, and the ways.

Tensors that share their storage, or lie in one process, need none of them: see ``buckets``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, Pending
from tandem.comm.world import IPC_DEVICES
from tandem.sync.failure import SyncError


class Way(Enum):
    """How bytes travel between processes."""

    COLLECTIVE = "collective"
    """A broadcast by the library that is native to the devices."""
    IPC = "ipc"
    """The receivers map the sender's bucket, which lies on the same device."""
    STAGED = "staged"
    """Through buckets in the memory of the hosts."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a process has its tensors. ``device_id`` tells devices of one type apart, anywhere."""

    device_type: str
    device_id: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A way, and why it was taken."""

    way: Way
    reason: str


def endpoint_of(device: torch.device) -> Endpoint:
    """This process's."""
    if device.type == "cpu":
        return Endpoint("cpu", "")
    properties = torch.get_device_module(device).get_device_properties(device)
    return Endpoint(device.type, str(properties.uuid))


def choose_way(endpoints: Sequence[Endpoint], wanted: Way | None = None) -> Choice:
    """The fastest way that exists between these processes, or the wanted one.

    Raises:
        SyncError: the wanted one does not exist between them.
    """
    types = {endpoint.device_type for endpoint in endpoints}
    devices = {endpoint.device_id for endpoint in endpoints}
    possible = [Choice(Way.STAGED, f"tensors lie on {' and '.join(sorted(types))}")]
    if types == {"cpu"}:
        possible = [Choice(Way.COLLECTIVE, "all tensors lie in host memory"), *possible]
    elif len(types) == 1 and len(devices) == len(endpoints):
        possible = [Choice(Way.COLLECTIVE, f"each process has a {min(types)} device"), *possible]
    elif types <= IPC_DEVICES and len(devices) == 1:
        possible = [Choice(Way.IPC, f"the processes share a {min(types)} device"), *possible]
    if wanted is None:
        return possible[0]
    for choice in possible:
        if choice.way is wanted:
            return Choice(wanted, "as asked for")
    ways = ", ".join(choice.way.value for choice in possible)
    raise SyncError(f"transport {wanted.value} does not exist between {endpoints}: only {ways}")


class Transport(Protocol):
    """One way among the processes of a group.

    Posting and waiting belong to the current stream: what is queued on it before ``post`` is done
    before the bucket is touched, and what is queued after ``Pending.wait`` sees the message.
    """

    @property
    def device(self) -> torch.device:
        """Where its buckets lie."""
        ...

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        """Start a message. ``bucket`` is uint8, of the message's length in all processes."""
        ...


@dataclass(frozen=True, slots=True)
class Collective:
    """Implements ``Transport`` by the group's own broadcast."""

    group: Group
    device: torch.device

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del deadline
        return self.group.broadcast(bucket, root=sender)


@dataclass(frozen=True, slots=True)
class Staged:
    """Implements ``Transport`` through the host. ``group`` is one of the host."""

    group: Group
    tensors_on: torch.device
    device: torch.device = torch.device("cpu")

    def post(self, bucket: Tensor, *, sender: int, deadline: Deadline) -> Pending:
        del deadline
        finish_queued(self.tensors_on)
        return self.group.broadcast(bucket, root=sender)


@dataclass(frozen=True, slots=True)
class Ipc:
    """Implements ``Transport`` by copies within a device. ``group`` is one of the host; each
    message is done when ``post`` returns."""

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
        return _Done()


@dataclass(frozen=True, slots=True)
class _Done:
    def wait(self, deadline: Deadline) -> None:
        del deadline


def finish_queued(device: torch.device) -> None:
    """Wait for what the current stream of ``device`` has been given."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
