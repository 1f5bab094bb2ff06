# SPDX-License-Identifier: Apache-2.0
"""A link between processes that hold weights and processes that need them; one may do both.

Every process of a link opens it and calls ``transfer`` with the same versions. A transfer ends in
all of them in the same way: the weights of every receiver are a whole version, or ``SyncError``
with the first cause. While a failure concerns one process alone, it keeps taking part, so that the
others learn of it and the next transfer works; when a process is gone, all leave, and the link is
formed again with ``rejoin``. Not here: who calls whom and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline, GroupError, report_failure
from tandem.comm.group import Group, GroupPlace, form_group
from tandem.sync.buckets import copy_all
from tandem.sync.checksum import is_checked
from tandem.sync.failure import FirstFailure, SyncError
from tandem.sync.forming import (
    FormedLink,
    LinkPlace,
    LinkSettings,
    LinkTensors,
    form_link,
    list_slices,
)
from tandem.sync.gate import WeightGate
from tandem.sync.transfer import Moved, Transfer, find_mismatch, make_streams
from tandem.sync.transport import finish_queued
from tandem.types import HeldSlice, SliceSpec

MakeGroup = Callable[[Store, GroupPlace], Group]

_ROLL_CALL_S = 1.0
"""How long the survivors of a broken link wait for each other, to tell who is gone."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """What one transfer did in this process: bytes with padding, buckets packed and loaded."""

    version: int
    duration_s: float
    sent_bytes: int
    received_bytes: int
    num_packs: int
    num_loads: int


def open_link(
    store: Store,
    place: LinkPlace,
    *,
    tensors: LinkTensors,
    settings: LinkSettings,
    generation: int = 0,
    make_group: MakeGroup = form_group,
) -> WeightLink:
    """Form a link; every one of its processes calls this at the same time.

    Args:
        store: a client of the driver's, one that no other thread waits at.
        generation: greater than 0 in a process that replaces another; see ``WeightLink.rejoin``.

    Raises:
        SyncError: in all processes, if one did not come in time or layouts do not match.

    Example:
        a rollout beside a trainer that does the same with ``sends`` as rank 0::

            place = LinkPlace("weights", rank=1, size=2, role="rollout 0", device=device)
            tensors = LinkTensors(receives=engine.held_slices)
            link = open_link(store, place, tensors=tensors, settings=settings)
            link.transfer(version)  # when the trainer does
            with link.gate.reading(timeout_s) as version:
                ...  # generate
    """
    link = WeightLink(store, place, tensors=tensors, settings=settings, make_group=make_group)
    link.rejoin(generation)
    return link


def end_link(store: Store, name: str, *, generation: int, cause: str) -> None:
    """Tell all processes of a link that one of them is gone, so that none waits for it any longer.
    For whoever watches the processes."""
    report_failure(store, _failure_key(name, generation), cause=cause)


def _failure_key(name: str, generation: int) -> str:
    return f"sync/{name}/{generation}/failure"


class WeightLink:
    """One process's end of a link.

    Attributes:
        gate: how to use the received weights, and their version; see ``WeightGate``. A receiver
            that starts out with whole weights publishes their version there.
    """

    def __init__(
        self,
        store: Store,
        place: LinkPlace,
        *,
        tensors: LinkTensors,
        settings: LinkSettings,
        make_group: MakeGroup = form_group,
    ) -> None:
        """Not formed yet: use ``open_link``."""
        self.gate = WeightGate()
        self._store = store
        self._place = place
        self._tensors = tensors
        self._settings = settings
        self._make_group = make_group
        self._streams = make_streams(place.device)
        self._generation = 0
        self._formed: FormedLink | None = None
        self._groups: list[Group] = []
        self._copies: list[HeldSlice] = []
        self._checks_all = True

    def rejoin(self, generation: int) -> None:
        """Form the link anew, after a process was replaced. All its processes name the same
        ``generation``, one never used before. Errors as ``open_link``."""
        self.close()
        self._generation = generation
        self._checks_all = True
        try:
            self._formed = form_link(
                self._place,
                self._tensors,
                settings=self._settings,
                form=self._form_group,
                deadline=self._deadline(),
            )
        except GroupError as error:
            raise self._broken(str(error)) from error
        except SyncError:
            self.close()
            raise

    def transfer(self, version: int) -> TransferReport:
        """Send and receive the weights as they are now, as ``version``.

        Raises:
            SyncError: in all processes, if one of them failed or is gone. Received weights cannot
                be used until a later transfer succeeds; double-buffered ones stay what they were.
                Also if these have arrived and cannot be replaced, in this process alone: then they
                cannot be used either.
        """
        if self._formed is None:
            raise SyncError(f"link {self._place.name} is not formed: rejoin it")
        started = time.perf_counter()
        try:
            with torch.no_grad(), ExitStack() as gate:
                moved = self._transfer(self._formed, version, gate=gate)
        except GroupError as error:
            raise self._broken(str(error)) from error
        except SyncError:
            raise
        except BaseException as error:
            self._broken(f"{type(error).__name__}: {error}")
            raise
        return TransferReport(
            version=version,
            duration_s=time.perf_counter() - started,
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            num_packs=moved.num_packs,
            num_loads=moved.num_loads,
        )

    def close(self) -> None:
        """Leave; at once, and idempotent."""
        self._formed = None
        while self._groups:
            self._groups.pop().close()

    def _transfer(self, formed: FormedLink, version: int, *, gate: ExitStack) -> Moved:
        """Prepare, agree, move, agree, publish. ``gate`` is left when this has returned."""
        deadline = self._deadline()
        failure = FirstFailure()
        sends, live = self._slices(formed, failure)
        _agree_to_start(formed, formed.control.gather((version, failure.cause), deadline))

        targets = live
        if live and self._settings.double_buffered:
            with failure.noted("making room for a second copy of the weights"):
                targets = self._second_copy(live)
        elif live and self._enter(gate, failure):
            self.gate.forbid(f"version {version} did not arrive whole")
        checks_all = self._checks_all
        moved = Transfer(
            formed=formed,
            place=self._place,
            settings=self._settings,
            streams=self._streams,
            is_checked=lambda piece: checks_all or is_checked(piece, version),
            failure=failure,
            deadline=deadline,
        ).run(sends, targets)

        if targets is not live:
            self._enter(gate, failure)
        self._checks_all = True
        _agree_on_end(formed, formed.control.gather((failure.cause, moved.checksums), deadline))
        self._checks_all = False
        if live:
            self._publish(live, targets, version=version)
        return moved

    def _slices(
        self, formed: FormedLink, failure: FirstFailure
    ) -> tuple[list[HeldSlice], list[HeldSlice]]:
        """What is sent and what is received into, none of it after a failure."""
        with failure.noted("listing weights"):
            sends = list_slices(self._tensors.sends)
            live = list_slices(self._tensors.receives)
            _check_unchanged(sends, formed.layout.sends)
            _check_unchanged(live, formed.layout.needs)
            return sends, live
        return [], []

    def _enter(self, gate: ExitStack, failure: FirstFailure) -> bool:
        """Wait until nobody uses the weights; half of the time is left for what follows."""
        with failure.noted("taking the weights out of use"):
            gate.enter_context(self.gate.writing(self._settings.timeout_s / 2))
            return True
        return False

    def _second_copy(self, live: Sequence[HeldSlice]) -> list[HeldSlice]:
        """Where a version arrives while the one before it is in use. Made once."""
        if not self._copies:
            self._copies = [
                HeldSlice(held.spec, torch.empty_like(held.tensor, requires_grad=False))
                for held in live
            ]
        return self._copies

    def _publish(
        self, live: Sequence[HeldSlice], arrived: Sequence[HeldSlice], *, version: int
    ) -> None:
        """Nobody uses the weights meanwhile."""
        if live is not arrived:
            names = [held.spec.name for held in live]
            targets = [held.tensor.detach() for held in live]
            self.gate.forbid(f"version {version} did not replace the one before it wholly")
            copy_all(names, [held.tensor for held in arrived], targets=targets)
            finish_queued(self._place.device)
        self.gate.publish(version)

    def _form_group(self, purpose: str, members: tuple[int, ...], *, device: torch.device) -> Group:
        place = GroupPlace(
            name=f"sync/{self._place.name}/{self._generation}/{purpose}",
            members=members,
            rank=self._place.rank,
            device=device,
            timeout_s=self._settings.timeout_s,
        )
        self._groups.append(self._make_group(self._store, place))
        return self._groups[-1]

    def _deadline(self) -> Deadline:
        key = _failure_key(self._place.name, self._generation)
        return Deadline(self._settings.timeout_s, store=self._store, key=key)

    def _broken(self, cause: str) -> SyncError:
        """Leave, free all others, and find out who is gone."""
        for group in self._groups:
            group.abandon()
        self.close()
        place = self._place
        key = _failure_key(place.name, self._generation)
        first = report_failure(self._store, key, cause=f"{place.role} (rank {place.rank}): {cause}")
        absent = self._roll_call(f"{key}/survivor")
        names = ", ".join(f"rank {rank}" for rank in absent)
        return SyncError(
            f"link {place.name}: {first}" + (f"; no answer from {names}" if absent else "")
        )

    def _roll_call(self, key: str) -> list[int]:
        """The processes that do not say within a moment that they are still there."""
        keys = [f"{key}/{rank}" for rank in range(self._place.size)]
        try:
            self._store.set(keys[self._place.rank], "present")
            self._store.wait(keys, timedelta(seconds=_ROLL_CALL_S))
        except RuntimeError:  # some are missing, or the store itself is gone
            pass
        else:
            return []
        try:
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return []


def _check_unchanged(slices: Sequence[HeldSlice], planned: Sequence[SliceSpec]) -> None:
    listed = [held.spec for held in slices]
    if listed != list(planned):
        changed = set(listed) ^ set(planned)
        name = min((spec.name for spec in changed), default="their order")
        raise SyncError(f"{name}: its slices are not those that the link was formed with")


def _agree_to_start(formed: FormedLink, answers: Sequence[tuple[int, str]]) -> None:
    """Nobody has failed, and all mean the same version."""
    versions = {version for version, _ in answers}
    for (version, cause), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"version {version}: {role}: {cause}")
    if len(versions) > 1:
        told = ", ".join(f"{r}: {v}" for r, (v, _) in zip(formed.roles, answers, strict=True))
        raise SyncError(f"the processes do not transfer the same version ({told})")


def _agree_on_end(formed: FormedLink, answers: Sequence[tuple[str, dict[int, int]]]) -> None:
    """Nobody has failed, and what arrived is what was sent."""
    for (cause, _), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"{role}: {cause}")
    mismatch = find_mismatch(formed, [checksums for _, checksums in answers])
    if mismatch:
        raise SyncError(mismatch)
