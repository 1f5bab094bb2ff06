# SPDX-License-Identifier: Apache-2.0
"""What runs inside a worker process, whoever started it: isolation first, then one object whose
methods are called.

This file must not import torch, nor anything that does: the process is isolated before vendor
libraries are loaded, and what is to be built arrives as bytes that are unpickled only then.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import psutil

from tandem.errors import UserError
from tandem.platforms.isolation import (
    IsolationPlan,
    Visibility,
    apply_isolation,
    inherited_names,
    plan_isolation,
)
from tandem.platforms.place import WorkerPlace
from tandem.runtime.failure import ReportedError, symptom_of
from tandem.runtime.liveness import CallClock, Sign
from tandem.runtime.memory import keep_freed_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tandem.platforms.record import Platform

Build = Callable[[WorkerPlace], object]
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class Seat:
    """What the driver tells a new process.

    Attributes:
        place: without its device, which only the process knows.
        node_capacity: devices that the scheduler hands out on this node.
        folder: where the command was given; relative paths are meant from there.
        num_threads: with which the process computes on the host.
    """

    place: WorkerPlace
    visibility: Visibility
    node_capacity: int
    folder: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class Opened:
    """What a process tells of itself.

    Attributes:
        isolation: how it was isolated, in words.
        log: the file that its stderr goes to.
        actor: Ray's id for it.
    """

    place: WorkerPlace
    isolation: str
    host: str
    pid: int
    log: str
    actor: str = ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that was logged in the process ``source``."""

    source: str
    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of a call, and what was logged since the last one."""

    value: Any
    notices: tuple[Notice, ...]


class HostedObject:
    """The object of one process. Its methods are called by one thread at a time."""

    def __init__(self) -> None:
        self._plan = IsolationPlan()
        self._visibility: Visibility | None = None
        self._place: WorkerPlace | None = None
        self._platform: Platform | None = None
        self._object: object = None
        self._notices = _NoticeHandler()
        self._clock = CallClock()

    def open(self, seat: Seat, assigned: Sequence[str]) -> Opened:
        """Isolate this process. ``assigned`` is what the scheduler says that it may use."""
        with reported():
            if os.path.isdir(seat.folder):
                os.chdir(seat.folder)
            os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(seat.num_threads)))
            visible = [str(index) for index in range(seat.node_capacity)]
            if seat.visibility.is_known_to_ray:
                visible = inherited_names(seat.visibility, os.environ)
            self._plan = plan_isolation(
                seat.visibility, assigned, inherited=os.environ, node_visible=visible
            )
            apply_isolation(self._plan, os.environ)
            for name, value in interface_variables(seat.place.node_address).items():
                os.environ.setdefault(name, value)
            self._visibility = seat.visibility
            self._place = replace(
                seat.place,
                device_index=self._plan.local_index,
                physical_id=self._plan.physical_id,
                flagcx_path=os.environ.get("FLAGCX_PATH", ""),
            )
            self._notices.source = f"{seat.place.pool} rank {seat.place.rank}"
            logging.getLogger().addHandler(self._notices)
            log = os.path.realpath("/proc/self/fd/2")
            return Opened(self._place, str(self._plan), socket.gethostname(), os.getpid(), log)

    def confirm(self, payload: bytes) -> Reply:
        """Check that isolation had the effect that was planned, and take the device. Returns its
        ``Platform.device_uuid``; ``payload`` is the pickled platform."""
        with reported(), self._clock.running():
            platform: Platform = pickle.loads(payload)
            self._confirm(platform)
            self._platform = platform
            return Reply(platform.device_uuid(self._plan.local_index), self._notices.take())

    def build(self, payload: bytes) -> Reply:
        """Make the object. ``payload`` is the pickled ``Build``."""
        with reported(), self._clock.running():
            assert self._place is not None and self._platform is not None, "confirm() comes first"
            build: Build = pickle.loads(payload)
            keep_freed_memory()
            self._platform.prepare_thread()
            self._object = build(self._place)
            return Reply(None, self._notices.take())

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Reply:
        """Call a method of the object."""
        with reported(), self._clock.running():
            value = getattr(self._object, method)(*args, **kwargs)
            return Reply(value, self._notices.take())

    def sign(self) -> Sign:
        """That this process lives. Answered on a thread of its own, also during a call."""
        return self._clock.sign()

    def _confirm(self, platform: Platform) -> None:
        """Check that isolation had the effect that was planned, and take the device.

        Raises:
            UserError: its platform cannot be used here.
            RuntimeError: the process does not see what it should.
        """
        problem = platform.probe()
        if problem:
            raise UserError(
                f"platform={platform.name}: {self._notices.source} cannot use it on "
                f"{socket.gethostname()}: {problem} ({self._plan}). Keep its pool to nodes that "
                "can, or name another platform."
            )
        seen, index = platform.num_devices(), self._plan.local_index
        assert self._visibility is not None, "open() comes first"
        if (self._visibility.mode == "mask" and seen != 1) or index >= seen:
            raise RuntimeError(f"{platform.name} shows {seen} devices here, against: {self._plan}")
        platform.use_device(index)


@contextmanager
def reported() -> Iterator[None]:
    """Let exceptions out as ``ReportedError``."""
    try:
        yield
    except Exception as error:
        raise ReportedError(symptom_of(error, time_s=time.time())) from None


def interface_variables(address: str) -> dict[str, str]:
    """How gloo and NCCL are told the network that other nodes reach this one by: left alone, they
    take the one that the host's name happens to stand for. Nothing where there is only one node."""
    if ip_address(address).is_loopback:
        return {}
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return dict.fromkeys(_INTERFACE_VARIABLES, interface)
    return {}


class _NoticeHandler(logging.Handler):
    """Keeps warnings until the next reply takes them along: nobody reads a worker's terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.source = ""
        self._kept: list[Notice] = []

    def emit(self, record: logging.LogRecord) -> None:
        notice = Notice(self.source, record.name, record.levelno, record.getMessage())
        self._kept.append(notice)

    def take(self) -> tuple[Notice, ...]:
        taken, self._kept = tuple(self._kept), []
        return taken
