# SPDX-License-Identifier: Apache-2.0
"""A link between processes that hold weights and processes that need them; one may do both.

Every process of a link opens it and calls ``begin`` with the same versions. A transfer ends in all
of them in the same way: every receiver has a whole version, or ``SyncError`` with the first cause.
While a failure concerns one process alone, it keeps taking part, so that the others learn of it and
the next transfer works; when a process is gone, all leave, and the link is formed again with
``rejoin``. Not here: who calls whom and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import GroupError
from tandem.comm.group import form_group
from tandem.errors import UserError
from tandem.types import HeldSlice
from tandem.weight_sync.background import Background
from tandem.weight_sync.checks import agree_on_end, agree_to_start, list_planned
from tandem.weight_sync.checksum import is_checked
from tandem.weight_sync.failure import FirstFailure, SyncError
from tandem.weight_sync.gate import WeightGate
from tandem.weight_sync.groups import MakeGroup, Membership
from tandem.weight_sync.handshake import (
    FormedLink,
    LinkPlace,
    LinkSettings,
    LinkTensors,
    form_link,
)
from tandem.weight_sync.staging import Arrivals, Copy, HostCopy, make_copies
from tandem.weight_sync.transfer import Transfer, TransferReport, make_streams
from tandem.weight_sync.transport import finish_queued

T = TypeVar("T")


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
            link.begin(version)  # when the trainer does
            link.swap(version)
            with link.gate.reading(timeout_s) as version:
                ...  # generate
    """
    link = WeightLink(store, place, tensors=tensors, settings=settings, make_group=make_group)
    link.rejoin(generation)
    return link


class WeightLink:
    """One process's end of a link.

    Where versions arrive in copies, or are sent from one, the process does its part of a transfer
    on a thread. It waits only to pack what it sends; if that is not staged, until it has been sent.

    Attributes:
        gate: how to use the received weights, and their version; see ``WeightGate``. A receiver
            that starts out with whole weights publishes their version there.
        receives: whether this process does.
        num_loads: how many buckets have been loaded into weights, or into copies of them.
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
        self.receives = False
        self.num_loads = 0
        self._store = store
        self._place = place
        self._tensors = tensors
        self._settings = settings
        self._make_group = make_group
        self._streams = make_streams(place.device)
        self._membership = self._new_membership(0)
        self._formed: FormedLink | None = None
        self._outbox: HostCopy | None = None
        self._arrivals: Arrivals | None = None
        self._checks_all = True
        self._background = Background(f"link {place.name}")
        self._report: TransferReport | None = None

    def rejoin(self, generation: int) -> None:
        """Form the link anew, after a process was replaced. All its processes name the same
        ``generation``, one never used before. What has arrived and is not in use is given up.
        Errors as ``open_link``."""
        self.close()
        self._membership = self._new_membership(generation)
        self._checks_all = True
        self._outbox = self._arrivals = None
        self._background = Background(f"link {self._place.name}")
        try:
            self._formed = form_link(
                self._place,
                self._tensors,
                settings=self._settings,
                form=self._membership.form_group,
                deadline=self._membership.deadline(),
            )
        except GroupError as error:
            raise self._lost(error) from error
        except (SyncError, UserError):
            self.close()
            raise
        self.receives = bool(self._formed.layout.needs)

    def begin(self, version: int) -> None:
        """Send and receive the weights as they are now, as ``version``. Returns as soon as this
        process may go on, with weights that it may change or use; an earlier transfer has ended.

        Raises:
            SyncError: in all processes, if one of them failed or is gone; where that happens in the
                background, at the next call. Weights that are received in place cannot be used
                until a later transfer succeeds, others stay what they were. If it is the error of
                an earlier transfer, this one has not begun.
        """
        self.wait()
        formed = self._formed_or_raise()
        failure = FirstFailure()
        sends, live = list_planned(self._tensors, formed.layout, failure=failure)
        is_staged, is_sender = self._settings.staged, bool(formed.layout.sends)
        if is_staged and is_sender:
            self._guarded(lambda: self._pack(formed, version, sends=sends, failure=failure))
        if live and self._settings.num_copies and self._arrivals is None:
            with failure.noted("making room for copies of the weights"):
                copies = make_copies(self._place, self._settings, formed=formed, live=live)
                self._arrivals = Arrivals(copies)

        def move() -> None:
            self._report = self._guarded(
                lambda: self._move(formed, version, sends=sends, live=live, failure=failure)
            )

        if self._settings.num_copies == 0 or (is_sender and not is_staged):
            move()
        else:
            self._start(move)

    def wait(self) -> TransferReport | None:
        """Until what was begun has ended. Returns what the last transfer did, None before the
        first. Errors as ``begin``."""
        self._background.join()
        self.check()
        return self._report

    def check(self) -> None:
        """Raise the SyncError of a transfer in the background, if it has not been raised yet."""
        self._background.check()

    def swap(self, version: int | None = None) -> int | None:
        """Put the newest version that has arrived in use, whole; nothing is touched if none is new.

        Args:
            version: wait until it is there, or a later one.

        Returns:
            the version in use, None if there is none.

        Raises:
            SyncError: as ``begin``; or ``version`` is not coming; or new weights cannot replace the
                old ones, which ends the link, and then none can be used.
        """
        self.check()
        arrivals = self._arrivals
        if arrivals is not None:
            if version is not None and _is_before(self.gate.version, version):
                arrivals.wait(version)
                self.check()
            with arrivals.taking() as taken:
                if taken is not None:
                    self._guarded(lambda: self._put(*taken))
        if version is not None and _is_before(self.gate.version, version):
            raise SyncError(f"version {version} is not coming: {self.gate.version} is in use")
        return self.gate.version

    def transfer(self, version: int) -> TransferReport:
        """``begin``, wait until it has ended, and ``swap``."""
        self.begin(version)
        report = self.wait()
        assert report is not None, "a transfer has ended"
        if self.receives:
            self.swap(version)
        return report

    def close(self) -> None:
        """Leave, within a moment, whatever is under way; idempotent."""
        if self._background.is_busy:
            self._membership.free_others(" left during a transfer")
            self._background.join()
        self._formed = None
        self._membership.leave()

    def _start(self, move: Callable[[], None]) -> None:
        """Do it in the background."""
        arrivals, device = self._arrivals, self._place.device

        def run() -> None:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device)
            move()

        if arrivals is None:
            self._background.start(run, then=lambda: None)
        else:
            arrivals.expect()
            self._background.start(run, then=arrivals.settle)

    def _guarded(self, function: Callable[[], T]) -> T:
        """Call it; whatever this process alone cannot go on after frees all others."""
        try:
            with torch.no_grad():
                return function()
        except GroupError as error:
            raise self._lost(error) from error
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
        """Prepare, agree, move, agree, publish."""
        started = time.perf_counter()
        transfer = self._transfer(formed, version, failure=failure)
        deadline = transfer.deadline
        copy: Copy | None = None
        if live and self._arrivals is not None:
            with failure.noted("taking in a version"):
                copy = self._arrivals.claim(self._settings.timeout_s / 2)
        agree_to_start(formed, formed.control.gather((version, failure.cause), deadline))
        with ExitStack() as gate:
            if copy is None and live and self._enter(gate, failure):
                self.gate.forbid(f"version {version} did not arrive whole")
            source = self._outbox.sending(transfer) if self._outbox else transfer.packing(sends)
            target = copy.receiving(transfer) if copy else transfer.loading(live)
            transfer.post(source, target)
            transfer.copy_local(sends, live)
            moved = transfer.finish(source, target)
            if formed.local:
                finish_queued(self._place.device)
            self._checks_all = True
            answers = formed.control.gather((failure.cause, moved.checksums), deadline)
            agree_on_end(formed, answers)
            self._checks_all = False
            self.num_loads += moved.num_loads
            if copy is not None and self._arrivals is not None:
                self._arrivals.arrive(copy, version)
            elif live:
                self.gate.publish(version)
        return moved.report(version, duration_s=time.perf_counter() - started)

    def _put(self, version: int, copy: Copy) -> None:
        """Replace the weights by a version that has arrived."""
        formed = self._formed_or_raise()
        failure = FirstFailure()
        with failure.noted("taking the weights out of use"):
            self._tensors.settle()
        _, live = list_planned(self._tensors, formed.layout, failure=failure)
        transfer = self._transfer(formed, version, failure=failure)
        transfer = replace(transfer, is_checked=lambda piece: False)  # they were when they arrived
        with self.gate.writing(self._settings.timeout_s):
            if not failure.cause:
                self.gate.forbid(f"version {version} did not replace the one before it wholly")
                self.num_loads += copy.put(transfer, live)
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
            is_checked=lambda piece: checks_all or is_checked(piece, version),
            failure=failure,
            deadline=self._membership.deadline(),
        )

    def _enter(self, gate: ExitStack, failure: FirstFailure) -> bool:
        """Wait until nobody uses the weights; half of the time is left for what follows."""
        with failure.noted("taking the weights out of use"):
            self._tensors.settle()
            gate.enter_context(self.gate.writing(self._settings.timeout_s / 2))
            return True
        return False

    def _end(self, cause: str) -> None:
        """Leave, and free all others."""
        self._formed = None
        self._membership.end(cause)

    def _lost(self, error: GroupError) -> SyncError:
        """What to raise when another process is gone, or has ended the link."""
        self._formed = None
        return self._membership.lost(str(error))

    def _new_membership(self, generation: int) -> Membership:
        return Membership(
            self._store,
            self._place,
            generation=generation,
            settings=self._settings,
            make_group=self._make_group,
        )

    def _formed_or_raise(self) -> FormedLink:
        if self._formed is None:
            raise SyncError(f"link {self._place.name} is not formed: rejoin it")
        return self._formed


def _is_before(in_use: int | None, version: int) -> bool:
    return in_use is None or in_use < version
