# SPDX-License-Identifier: Apache-2.0
"""How a message gets from the sender's bucket into the receivers': the ways that ``ways`` names.

Tensors that share their storage, or lie in one process, need none of them: see ``buckets``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, Pending


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
        return Done()


@dataclass(frozen=True, slots=True)
class Done:
    """Implements ``Pending`` for what is not under way any more."""

    def wait(self, deadline: Deadline) -> None:
        del deadline


def finish_queued(device: torch.device) -> None:
    """Wait for what the current stream of ``device`` has been given."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
