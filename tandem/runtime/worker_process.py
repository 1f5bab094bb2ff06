# SPDX-License-Identifier: Apache-2.0
"""The code inside a worker process: isolation first, then calls of one object's methods.

This file must not import torch, nor anything that does: the process is isolated before vendor
libraries are loaded. The builder of the object arrives as bytes and is unpickled afterwards.
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
from tandem.runtime.liveness import CallMonitor, Heartbeat
from tandem.runtime.os_settings import keep_freed_memory, no_collection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tandem.platforms.record import Platform

Build = Callable[[WorkerPlace], object]
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class WorkerAssignment:
    """The driver's message that turns a new process into a worker.

    Attributes:
        place: the worker's place without its device, which only the process knows.
        node_capacity: the number of devices that the scheduler hands out on this node.
        folder: the working directory of the driver, where relative paths start.
        num_threads: the number of threads for computation on the host.
    """

    place: WorkerPlace
    visibility: Visibility
    node_capacity: int
    folder: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The answer of a worker that has been isolated.

    Attributes:
        isolation: the description of its isolation.
        log: the path of the file that its stderr goes to.
        actor: Ray's id of the worker.
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
    """The result of a call, and the warnings that were logged since the last one."""

    value: Any
    notices: tuple[Notice, ...]


class WorkerProcess:
    """A process of a pool, with the one object whose methods the driver calls one at a time."""

    def __init__(self) -> None:
        self._plan = IsolationPlan()
        self._visibility: Visibility | None = None
        self._place: WorkerPlace | None = None
        self._platform: Platform | None = None
        self._object: object = None
        self._notices = _NoticeHandler()
        self._monitor = CallMonitor()

    def isolate(self, assignment: WorkerAssignment, assigned: Sequence[str]) -> WorkerInfo:
        """Isolate this process to the devices that the scheduler has ``assigned`` to it."""
        with reported():
            if os.path.isdir(assignment.folder):
                os.chdir(assignment.folder)
            os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(assignment.num_threads)))
            visible = [str(index) for index in range(assignment.node_capacity)]
            if assignment.visibility.is_known_to_ray:
                visible = inherited_names(assignment.visibility, os.environ)
            self._plan = plan_isolation(
                assignment.visibility, assigned, inherited=os.environ, node_visible=visible
            )
            apply_isolation(self._plan, os.environ)
            for name, value in interface_variables(assignment.place.node_address).items():
                os.environ.setdefault(name, value)
            self._visibility = assignment.visibility
            self._place = replace(
                assignment.place,
                device_index=self._plan.local_index,
                physical_id=self._plan.physical_id,
                flagcx_path=os.environ.get("FLAGCX_PATH", ""),
            )
            self._notices.source = f"{assignment.place.pool} rank {assignment.place.rank}"
            logging.getLogger().addHandler(self._notices)
            log = os.path.realpath("/proc/self/fd/2")
            return WorkerInfo(self._place, str(self._plan), socket.gethostname(), os.getpid(), log)

    def confirm(self, payload: bytes) -> Reply:
        """Check that isolation had the planned effect, and take the device.

        Args:
            payload: the pickled platform.

        Returns:
            the device's ``Platform.device_uuid``.
        """
        with reported(), self._monitor.running():
            with no_collection():
                platform: Platform = pickle.loads(payload)  # imports torch
            self._confirm(platform)
            self._platform = platform
            return Reply(platform.device_uuid(self._plan.local_index), self._notices.take())

    def build(self, payload: bytes) -> Reply:
        """Build the object with the ``Build`` that is pickled in ``payload``."""
        with reported(), self._monitor.running():
            assert self._place is not None and self._platform is not None, "confirm() comes first"
            with no_collection():
                build: Build = pickle.loads(payload)  # imports what the object needs
            keep_freed_memory()
            self._platform.prepare_thread()
            self._object = build(self._place)
            return Reply(None, self._notices.take())

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Reply:
        """Call a method of the object."""
        with reported(), self._monitor.running():
            value = getattr(self._object, method)(*args, **kwargs)
            return Reply(value, self._notices.take())

    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat. It is called on a separate thread, also during a call."""
        return self._monitor.heartbeat()

    def _confirm(self, platform: Platform) -> None:
        """Raise UserError or RuntimeError unless this process sees the planned devices."""
        problem = platform.probe()
        if problem:
            raise UserError(
                f"platform={platform.name}",
                rule=f"{self._notices.source} cannot use it on {socket.gethostname()}: {problem} "
                f"({self._plan})",
                remedy="Place its pool on nodes that can use it, or choose another platform.",
            )
        seen, index = platform.num_devices(), self._plan.local_index
        assert self._visibility is not None, "isolate() comes first"
        if (self._visibility.mode == "mask" and seen != 1) or index >= seen:
            raise RuntimeError(f"{platform.name} shows {seen} devices here, against: {self._plan}")
        platform.use_device(index)


@contextmanager
def reported() -> Iterator[None]:
    """Turn exceptions into ``ReportedError``."""
    try:
        yield
    except Exception as error:
        raise ReportedError(symptom_of(error, time_s=time.time())) from None


def interface_variables(address: str) -> dict[str, str]:
    """Return the variables that set the network interface of gloo and NCCL to that of ``address``.

    Without them, the libraries use the interface that the host's name resolves to. A single node
    has none.
    """
    if ip_address(address).is_loopback:
        return {}
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return dict.fromkeys(_INTERFACE_VARIABLES, interface)
    return {}


class _NoticeHandler(logging.Handler):
    """A handler that keeps warnings for the next reply, because a worker's stderr is not shown."""

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
