# SPDX-License-Identifier: Apache-2.0
"""A link between processes that hold weights and processes that need them; some do both.

Every process of a link opens it and calls ``begin`` with the same versions. A transfer ends in the
same way in all of them: every receiver has a whole version, or all raise ``SyncError`` with the
first cause. A process that fails alone keeps taking part, so that the others learn of the failure
and the next transfer works. When a process is gone, the link ends in all others. The callers decide
when weights are transferred.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import Deadline, GroupError, report_failure
from tandem.comm.group import Group, GroupPlace, form_group
from tandem.errors import UserError
from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.checksum import is_sampled
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.gate import WeightGate
from tandem.weight_sync.handshake import (
    FormedLink,
    LinkPlace,
    LinkSettings,
    LinkTensors,
    form_link,
    list_slices,
)
from tandem.weight_sync.plan import Layout
from tandem.weight_sync.staging import HostCopy, StagedVersions, VersionCopy, make_copies
from tandem.weight_sync.transfer import Transfer, TransferReport, make_streams
from tandem.weight_sync.transport import finish_queued

MakeGroup = Callable[[Store, GroupPlace], Group]
T = TypeVar("T")


def open_link(
    store: Store,
    place: LinkPlace,
    *,
    tensors: LinkTensors,
    settings: LinkSettings,
    make_group: MakeGroup = form_group,
) -> WeightLink:
    """Form a link. All of its processes call this at the same time.

    Args:
        store: a client of the driver's store at which no other thread waits.

    Raises:
        SyncError: in all processes, if one did not join in time or layouts do not match.

    Example:
        a rollout; the trainer does the same as rank 0, with ``sends``::

            place = LinkPlace("weights", rank=1, size=2, role="rollout 0", device=device)
            tensors = LinkTensors(receives=engine.held_slices)
            link = open_link(store, place, tensors=tensors, settings=settings)
            link.begin(version)  # when the trainer does
            link.swap(version)
            with link.gate.reading(timeout_s) as version:
                ...  # generate
    """
    groups = LinkGroups(store, place, settings=settings, make_group=make_group)
    try:
        formed = form_link(
            place, tensors, settings=settings, form=groups.form_group, deadline=groups.deadline()
        )
    except GroupError as error:
        raise groups.lost(str(error)) from error
    except (SyncError, UserError):
        groups.leave()
        raise
    return WeightLink(place, tensors=tensors, settings=settings, groups=groups, formed=formed)


class WeightLink:
    """The end of a link in one process. One thread calls its methods; any may use the gate.

    If versions arrive in copies, or are sent from one, a background thread performs the transfer.
    The caller then waits only until its weights are packed, or sent if they are not staged.

    Attributes:
        gate: the lock and the version of the received weights. A receiver that starts with whole
            weights publishes their version there.
        receives: whether this process receives weights.
        num_loads: the number of buckets that have been loaded into weights or into their copies.
    """

    def __init__(
        self,
        place: LinkPlace,
        *,
        tensors: LinkTensors,
        settings: LinkSettings,
        groups: LinkGroups,
        formed: FormedLink,
    ) -> None:
        """Use a link that ``open_link`` has formed."""
        self.gate = WeightGate()
        self.receives = bool(formed.layout.needs)
        self.num_loads = 0
        self._place = place
        self._tensors = tensors
        self._settings = settings
        self._streams = make_streams(place.device)
        self._groups = groups
        self._formed: FormedLink | None = formed
        self._outbox: HostCopy | None = None
        self._staged: StagedVersions | None = None
        self._checks_all = True
        self._background = Background(f"link {place.name}")
        self._report: TransferReport | None = None

    def begin(self, version: int) -> None:
        """Send and receive the current weights as ``version``, after any earlier transfer.

        Return as soon as this process may change the weights that it sends and use those that it
        receives.

        Raises:
            SyncError: in all processes, if one of them failed or is gone; for a background transfer
                at the next call. Weights that are received in place cannot be used until a later
                transfer succeeds; others keep their version. If the error belongs to an earlier
                transfer, this one has not begun.
        """
        self.wait()
        formed = self._formed_or_raise()
        failure = FirstFailure()
        sends, live = _list_planned(self._tensors, formed.layout, failure=failure)
        is_staged, is_sender = self._settings.staged, bool(formed.layout.sends)
        if is_staged and is_sender:
            self._guarded(lambda: self._pack(formed, version, sends=sends, failure=failure))
        if live and self._settings.num_copies and self._staged is None:
            with failure.noted("making room for copies of the weights"):
                copies = make_copies(self._place, self._settings, formed=formed, live=live)
                self._staged = StagedVersions(copies)

        def move() -> None:
            self._report = self._guarded(
                lambda: self._move(formed, version, sends=sends, live=live, failure=failure)
            )

        if self._settings.num_copies == 0 or (is_sender and not is_staged):
            move()
        else:
            self._start(move)

    def wait(self) -> TransferReport | None:
        """Wait until the transfer has ended. Return its report, or None before the first one.

        Raises:
            SyncError: as ``begin``.
        """
        self._background.join()
        self.check()
        return self._report

    def check(self) -> None:
        """Raise the SyncError of a background transfer unless it has been raised already."""
        self._background.check()

    def swap(self, version: int | None = None) -> int | None:
        """Replace the weights by the newest version that has arrived whole, if one is new.

        Args:
            version: wait until this version or a later one has arrived.

        Returns:
            The version in use, None if there is none.

        Raises:
            SyncError: as ``begin``; or ``version`` will not arrive; or new weights cannot replace
                the old ones, which ends the link and leaves no usable weights.
        """
        self.check()
        staged = self._staged
        if staged is not None:
            if version is not None and _is_before(self.gate.version, version):
                staged.wait(version)
                self.check()
            with staged.taking() as taken:
                if taken is not None:
                    self._guarded(lambda: self._replace(*taken))
        if version is not None and _is_before(self.gate.version, version):
            raise SyncError(f"version {version} is not coming: {self.gate.version} is in use")
        return self.gate.version

    def transfer(self, version: int) -> TransferReport:
        """Begin a transfer, wait until it has ended, and swap."""
        self.begin(version)
        report = self.wait()
        assert report is not None, "a transfer has ended"
        if self.receives:
            self.swap(version)
        return report

    def close(self) -> None:
        """Leave the link at once, even during a transfer. Idempotent."""
        if self._background.is_busy:
            self._groups.free_others(" left during a transfer")
            self._background.join()
        self._formed = None
        self._groups.leave()

    def _start(self, move: Callable[[], None]) -> None:
        staged, device = self._staged, self._place.device

        def run() -> None:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            move()

        if staged is None:
            self._background.start(run, then=lambda: None)
        else:
            staged.expect()
            self._background.start(run, then=staged.settle)

    def _guarded(self, function: Callable[[], T]) -> T:
        """Call ``function``. End the link if this process cannot recover from an error."""
        try:
            with torch.no_grad():
                return function()
        except GroupError as error:
            self._formed = None
            raise self._groups.lost(str(error)) from error
        except SyncError:
            raise
        except BaseException as error:
            self._end(f"{type(error).__name__}: {error}")
            raise

    def _pack(
        self,
        formed: FormedLink,
        version: int,
        *,
        sends: Sequence[HeldSlice],
        failure: FirstFailure,
    ) -> None:
        with failure.noted("packing a copy of the weights on the host"):
            self._outbox = self._outbox or HostCopy(formed.sent, self._place.device)
            self._outbox.pack(self._transfer(formed, version, failure=failure), sends)

    def _move(
        self,
        formed: FormedLink,
        version: int,
        *,
        sends: Sequence[HeldSlice],
        live: Sequence[HeldSlice],
        failure: FirstFailure,
    ) -> TransferReport:
        started = time.perf_counter()
        transfer = self._transfer(formed, version, failure=failure)
        deadline = transfer.deadline
        copy: VersionCopy | None = None
        if live and self._staged is not None:
            with failure.noted("taking in a version"):
                copy = self._staged.claim(self._settings.timeout_s / 2)
        _agree_to_start(formed, formed.control.gather((version, failure.cause), deadline))
        with ExitStack() as gate:
            if copy is None and live and self._enter(gate, failure):
                self.gate.forbid(f"version {version} did not arrive whole")
            source = self._outbox.sending(transfer) if self._outbox else transfer.packing(sends)
            target = copy.receiving(transfer) if copy else transfer.loading(live)
            transfer.post(source, target)
            transfer.copy_local(sends, live)
            checksums = {**source.finish(deadline), **target.finish(deadline)}
            if formed.local:
                finish_queued(self._place.device)
            self._checks_all = True
            answers = formed.control.gather((failure.cause, checksums), deadline)
            _agree_on_end(formed, answers)
            self._checks_all = False
            self.num_loads += target.num_fillings
            if copy is not None and self._staged is not None:
                self._staged.arrive(copy, version)
            elif live:
                self.gate.publish(version)
        return TransferReport(
            version,
            duration_s=time.perf_counter() - started,
            sent_bytes=sum(message.num_bytes for message in formed.sent),
            received_bytes=sum(message.num_bytes for message in formed.received),
            num_packs=source.num_fillings,
        )

    def _replace(self, version: int, copy: VersionCopy) -> None:
        formed = self._formed_or_raise()
        failure = FirstFailure()
        with failure.noted("taking the weights out of use"):
            self._tensors.settle()
        _, live = _list_planned(self._tensors, formed.layout, failure=failure)
        transfer = self._transfer(formed, version, failure=failure)
        transfer = replace(transfer, is_checked=lambda segment: False)  # checked on arrival
        with self.gate.writing(self._settings.timeout_s):
            if not failure.cause:
                self.gate.forbid(f"version {version} did not replace the one before it wholly")
                self.num_loads += copy.replace(transfer, live)
                finish_queued(self._place.device)
            if failure.cause:
                self._end(f"version {version}: {failure.cause}")
                raise SyncError(f"version {version}: {self._place.role}: {failure.cause}")
            self.gate.publish(version)

    def _transfer(self, formed: FormedLink, version: int, *, failure: FirstFailure) -> Transfer:
        checks_all = self._checks_all
        return Transfer(
            formed=formed,
            place=self._place,
            settings=self._settings,
            streams=self._streams,
            is_checked=lambda segment: checks_all or is_sampled(segment, version),
            failure=failure,
            deadline=self._groups.deadline(),
        )

    def _enter(self, gate: ExitStack, failure: FirstFailure) -> bool:
        """Wait until the weights are not in use, for at most half of the time limit."""
        with failure.noted("taking the weights out of use"):
            self._tensors.settle()
            gate.enter_context(self.gate.writing(self._settings.timeout_s / 2))
            return True
        return False

    def _end(self, cause: str) -> None:
        self._formed = None
        self._groups.end(cause)

    def _formed_or_raise(self) -> FormedLink:
        if self._formed is None:
            raise SyncError(f"link {self._place.name} has ended")
        return self._formed


def _is_before(in_use: int | None, version: int) -> bool:
    return in_use is None or in_use < version


class LinkGroups:
    """The groups of one process in a link, and the propagation of the first failure.

    Several threads may call its methods once all groups are formed.
    """

    def __init__(
        self, store: Store, place: LinkPlace, *, settings: LinkSettings, make_group: MakeGroup
    ) -> None:
        """``settings.timeout_s`` bounds forming a group and each wait of a ``deadline``."""
        self._store = store
        self._place = place
        self._settings = settings
        self._make_group = make_group
        self._key = failure_key(place.name)
        self._groups: list[Group] = []

    def form_group(
        self,
        purpose: str,
        members: tuple[int, ...],
        *,
        device: torch.device,
        across: bool = False,
    ) -> Group:
        """See ``transport.FormGroup``."""
        here = self._place
        place = GroupPlace(
            name=f"weight_sync/{here.name}/{purpose}",
            members=members,
            rank=here.rank,
            device=device,
            timeout_s=self._settings.timeout_s,
            library="gloo" if device.type == "cpu" else here.platform.collectives,
        )
        make_group = here.flagcx.make_group if across and here.flagcx else self._make_group
        self._groups.append(make_group(self._store, place))
        return self._groups[-1]

    def deadline(self) -> Deadline:
        """Return the deadline of a collective operation that begins now."""
        return Deadline(self._settings.timeout_s, store=self._store, key=self._key)

    def end(self, cause: str) -> str:
        """Leave, and end the waits of all others. Return the first cause of any process."""
        for group in self._groups:
            group.abandon()
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(self._survivor(self._place.rank), "present")
        return self.free_others(f": {cause}")

    def lost(self, cause: str) -> SyncError:
        """End the link because another process is gone. Return the error that names it."""
        first = self.end(cause)
        absent = self._absent()
        names = ", ".join(f"rank {rank}" for rank in absent)
        return SyncError(
            f"link {self._place.name}: {first}" + (f"; no answer from {names}" if absent else "")
        )

    def free_others(self, event: str) -> str:
        """End all waits for this process because of ``event``. Return the first cause of any."""
        place = self._place
        cause = f"{place.role} (rank {place.rank}){event}"
        return report_failure(self._store, self._key, cause=cause)

    def leave(self) -> None:
        """Close the groups, after the last collective. Idempotent."""
        while self._groups:
            self._groups.pop().close()

    def _absent(self) -> list[int]:
        """Return the processes that do not report within ``roll_call_s``."""
        keys = [self._survivor(rank) for rank in range(self._place.size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._settings.roll_call_s))
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


def failure_key(name: str) -> str:
    """Return the store's key of the first failure in the link ``name``."""
    return f"weight_sync/{name}/failure"


class Background:
    """A background worker that runs one job at a time, each in a new thread.

    It keeps the error of a job until the owner calls ``check``.
    """

    def __init__(self, name: str) -> None:
        """``name`` is the name of the threads."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """Run ``job``, then ``then`` whether it failed or not. No other job may be running."""
        assert not self.is_busy, "one job at a time"

        def run() -> None:
            try:
                job()
            except BaseException as error:  # the owner's next check raises it
                self._error = error
            finally:
                then()

        # A daemon: at the end of the process it may be waiting for a silent peer.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the job has ended."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise the error of a job, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _agree_to_start(formed: FormedLink, answers: Sequence[tuple[int, str]]) -> None:
    """Raise SyncError if a process has failed or the versions differ."""
    versions = {version for version, _ in answers}
    for (version, cause), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"version {version}: {role}: {cause}")
    if len(versions) > 1:
        listed = ", ".join(f"{r}: {v}" for r, (v, _) in zip(formed.roles, answers, strict=True))
        raise SyncError(f"the processes do not transfer the same version ({listed})")


def _agree_on_end(formed: FormedLink, answers: Sequence[tuple[str, dict[int, int]]]) -> None:
    """Raise SyncError if a process has failed or a segment arrived corrupt."""
    for (cause, _), role in zip(answers, formed.roles, strict=True):
        if cause:
            raise SyncError(f"{role}: {cause}")
    checksums = [sums for _, sums in answers]
    arrivals = (
        (segment, message.route.sender, receiver)
        for message in formed.plan.messages
        for segment in message.segments
        for receiver in message.route.receivers
    )
    for segment, sender, receiver in arrivals:
        if checksums[receiver].get(segment.number) != checksums[sender].get(segment.number):
            raise SyncError(
                f"{segment.content.name}: {segment.content.region} arrived corrupt, "
                f"from {formed.roles[sender]} at {formed.roles[receiver]}"
            )


def _list_planned(
    tensors: LinkTensors, layout: Layout, *, failure: FirstFailure
) -> tuple[list[HeldSlice], list[HeldSlice]]:
    """List the slices to send and those to receive into; both are empty after a failure."""
    with failure.noted("listing weights"):
        sends = list_slices(tensors.sends)
        live = list_slices(tensors.receives)
        _check_unchanged(sends, layout.sends)
        _check_unchanged(live, layout.needs)
        return sends, live
    return [], []


def _check_unchanged(slices: Sequence[HeldSlice], planned: Sequence[SliceSpec]) -> None:
    listed = [held.spec for held in slices]
    if listed != list(planned):
        changed = set(listed) ^ set(planned)
        name = min((spec.name for spec in changed), default="their order")
        raise SyncError(f"{name}: its slices have changed since the link was formed")
