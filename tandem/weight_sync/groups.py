# SPDX-License-Identifier: Apache-2.0
"""One process in one generation of a link: the groups it is in, how long it waits, and how the
first failure reaches everybody. A new generation begins after a process was replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline, report_failure
from tandem.comm.group import Group, GroupPlace
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import LinkPlace, LinkSettings

MakeGroup = Callable[[Store, GroupPlace], Group]


class Membership:
    """See the module. Its methods may be called by several threads once all groups are formed."""

    def __init__(
        self,
        store: Store,
        place: LinkPlace,
        *,
        generation: int,
        settings: LinkSettings,
        make_group: MakeGroup,
    ) -> None:
        """``settings.timeout_s`` bounds forming a group and each wait of a ``deadline``."""
        self._store = store
        self._place = place
        self._generation = generation
        self._timeout_s = settings.timeout_s
        self._roll_call_s = settings.roll_call_s
        self._make_group = make_group
        self._key = failure_key(place.name, generation)
        self._groups: list[Group] = []

    def form_group(
        self,
        purpose: str,
        members: tuple[int, ...],
        *,
        device: torch.device,
        across: bool = False,
    ) -> Group:
        """Implements ``routing.FormGroup``."""
        here = self._place
        place = GroupPlace(
            name=f"sync/{here.name}/{self._generation}/{purpose}",
            members=members,
            rank=here.rank,
            device=device,
            timeout_s=self._timeout_s,
            library="gloo" if device.type == "cpu" else here.platform.collectives,
        )
        make_group = here.flagcx.make_group if across and here.flagcx else self._make_group
        self._groups.append(make_group(self._store, place))
        return self._groups[-1]

    def deadline(self) -> Deadline:
        """Of something that all processes do now."""
        return Deadline(self._timeout_s, store=self._store, key=self._key)

    def end(self, cause: str) -> str:
        """Leave, and free all others. Returns the first cause of all."""
        for group in self._groups:
            group.abandon()
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(self._survivor(self._place.rank), "present")
        return self.free_others(f": {cause}")

    def lost(self, cause: str) -> SyncError:
        """``end`` for want of another process. Returns what to raise, with who is gone."""
        first = self.end(cause)
        absent = self._absent()
        names = ", ".join(f"rank {rank}" for rank in absent)
        return SyncError(
            f"link {self._place.name}: {first}" + (f"; no answer from {names}" if absent else "")
        )

    def free_others(self, what: str) -> str:
        """Nobody waits for this process any longer. Returns the first cause of all."""
        place = self._place
        cause = f"{place.role} (rank {place.rank}){what}"
        return report_failure(self._store, self._key, cause=cause)

    def leave(self) -> None:
        """After the last collective; idempotent."""
        while self._groups:
            self._groups.pop().close()

    def _absent(self) -> list[int]:
        """The processes that do not say within a moment that they are still there."""
        keys = [self._survivor(rank) for rank in range(self._place.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._roll_call_s))
        except RuntimeError:  # some are missing, or the store itself is gone
            pass
        else:
            return []
        try:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return []

    def _survivor(self, rank: int) -> str:
        return f"{self._key}/survivor/{rank}"


def failure_key(name: str, generation: int) -> str:
    """Under which the first cause stands in the store."""
    return f"sync/{name}/{generation}/failure"
