# SPDX-License-Identifier: Apache-2.0
"""Real groups through which something goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from itertools import count

from torch import Tensor
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline
from tandem.comm.group import Group, GroupPlace, Pending, form_group

Fault = Callable[[int, Tensor], None]
"""Called with the number of a message and its bucket, when the message has arrived or was sent."""


def faulty(fault: Fault) -> Callable[[Store, GroupPlace], Group]:
    """Forms groups in which ``fault`` happens to every message of this process."""
    numbers = count()

    def make(store: Store, place: GroupPlace) -> Group:
        return _FaultyGroup(form_group(store, place), lambda bucket: fault(next(numbers), bucket))

    return make


def corrupting(messages: Container[int]) -> Callable[[Store, GroupPlace], Group]:
    """Forms groups that change the last byte of some messages, counted from 0."""

    def corrupt(number: int, bucket: Tensor) -> None:
        if number in messages:
            bucket[-1] ^= 0x10

    return faulty(corrupt)


class _FaultyGroup:
    def __init__(self, group: Group, after: Callable[[Tensor], None]) -> None:
        self.members = group.members
        self.gather = group.gather
        self.close = group.close
        self.abandon = group.abandon
        self._group = group
        self._after = after

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        return _Faulty(self._group.broadcast(tensor, root=root), tensor, self._after)


@dataclass(frozen=True)
class _Faulty:
    pending: Pending
    bucket: Tensor
    after: Callable[[Tensor], None]

    def wait(self, deadline: Deadline) -> None:
        self.pending.wait(deadline)
        self.after(self.bucket)
