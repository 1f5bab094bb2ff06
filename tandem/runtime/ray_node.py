# SPDX-License-Identifier: Apache-2.0
"""Ray's processes on this node, started by ``ray start`` in a separate session.

They end with the process that started them, whatever ends it. A signal to the driver's process
group, as ``timeout`` and terminals send it, does not reach them: the driver needs them to save.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from tandem.runtime.os_settings import die_with_parent
from tandem.runtime.token import token_environment

logger = logging.getLogger(__name__)

_LAST_LINES = 5
_STARTED = "Ray runtime started"
_FIRST_EXIT = re.compile(r"(\w+) \[exit code=(-?\d+)")
"""The line of ``ray start`` about a process whose end is the end of all."""
_VITAL = ("gcs_server", "raylet")
"""The processes without which Ray's other processes on the node end too."""
_NOTICE_S = 5.0
"""``ray start`` looks for lost processes every second, and then ends the others."""
_START_NOTICE_S = 2.0
"""While it starts, ``ray start`` does not look: it waits longer for a lost process to answer."""
_LOOK_S = 0.25
_POLL_S = 0.02
_REMOVAL_S = 5.0
_ADDRESS_FILE = "ray_current_cluster"
"""The file in Ray's folder to which ``ray start`` writes the address of the cluster."""
_RAY_START = "import sys; sys.modules['grpc'] = None; from ray.scripts.scripts import main; main()"
"""The command ``ray`` without the package grpc, as if that were not installed. With grpc it opens a
port, for Ray's client, at which it runs any code that it is sent.
"""
_LONGEST_SOCKET = (
    "/tandem-ray-12345678/ray/session_2026-11-26_21-04-03_949198_4194304/sockets/plasma_store.1"
)
"""The longest path of a socket that Ray makes within the folder of ``start_head``."""
_SHORT_FOLDER = "/tmp"
_MAX_SOCKET_BYTES = 107
"""The longest path of a socket that Linux takes."""
_USAGE_CODE = 2
"""The exit code of ``ray start``, as of any program with click, if it does not accept an option."""
_SWITCHES = ("head", "no_monitor", "enable_resource_isolation")
"""Options of ``ray start`` that take no value."""

_PORTS = range(20_000, 32_000)
"""The ports for a head. Ray opens its port some seconds after the choice. Meanwhile no connection
takes a port of this range: systems assign ports from 32768 on to sockets that ask for any.
"""

_ANY_WORKER_PORTS = {"min_worker_port": 0, "max_worker_port": 0}
"""Any free ports, as with ray.init. By default all clusters of a machine use the same ports."""

_ALWAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise each actor without a device warns that a later Ray changes its variables.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Otherwise ray.wait after ray.shutdown starts another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # The driver prints messages of raylets, such as the death of a worker, unless this matches.
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    # Otherwise Ray's head keeps a record of each of the last 100,000 calls: 39 KB a training step.
    "RAY_task_events_report_interval_ms": "0",
    # By default workers have niceness 15: beside another job, training would hardly advance.
    "RAY_worker_niceness": "0",
}
_RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""The time after which processes without a head end, by default a minute."""
_SEVERAL_NODES = {_RECONNECT_S: "8"}
_DRIVER = {_RECONNECT_S: "30"}
"""The driver needs time to say what has happened: Ray's library then ends it with a message."""
_ONE_NODE = {
    _RECONNECT_S: "4",
    # On any system: use the loopback interface instead of asking the network for an address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def driver_environment(role: Literal["local", "existing", "head", "member"]) -> dict[str, str]:
    """Return the variables that Ray reads when the driver imports it; see ``ray_environment``."""
    return ray_environment(role) | ({} if role == "existing" else _DRIVER)


def ray_environment(role: Literal["local", "existing", "head", "member"]) -> dict[str, str]:
    """Return the environment variables that Ray reads when it is imported or started.

    They silence Ray, make it notice lost processes sooner, and keep calls from starting a cluster.
    """
    if role == "existing":
        return dict(_ALWAYS)
    return _ALWAYS | (_ONE_NODE if role == "local" else _SEVERAL_NODES)


class RayNodeError(Exception):
    """``ray start`` ended before the node was up.

    The text is the last line that it printed, or how it ended if it printed nothing.

    Attributes:
        is_usage: whether it did not accept its options.
    """

    def __init__(self, text: str, *, is_usage: bool = False) -> None:
        super().__init__(text)
        self.is_usage = is_usage


class RayNode:
    """Ray's processes on this node. ``close`` ends them."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        role: Literal["local", "head", "member"],
        token: str,
        folder: Path | None = None,
    ) -> None:
        """Start the processes.

        Args:
            options: options of ``ray start``, with underscores for hyphens.
            token: the secret of the cluster.
            folder: a folder of this cluster alone, which ``close`` removes.
        """
        self._folder = folder
        given = _ANY_WORKER_PORTS | dict(options)
        flags = [_flag(name, value) for name, value in given.items() if value is not None]
        self._vital: dict[int, tuple[int, str]] = {}  # descriptors and names by process
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``close``
        self.process = subprocess.Popen(
            [sys.executable, "-c", _RAY_START, "start", "--block", *filter(None, flags)],
            env=os.environ | ray_environment(role) | token_environment(token, os.environ),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - it only makes one system call
        )

    @property
    def has_started(self) -> bool:
        """Whether its raylet has started."""
        return _STARTED in self._printed()

    def last_lines(self) -> list[str]:
        """Return the last non-empty lines that ``ray start`` printed."""
        return [line for line in self._printed().splitlines() if line.strip()][-_LAST_LINES:]

    def _printed(self) -> str:
        # Several threads may read, and a seek would move where ``ray start`` writes.
        written = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return written.decode(errors="replace")

    def describe_end(self, *, notice_s: float = _NOTICE_S) -> str:
        """Return which process of Ray ended the others and how; "" while they run.

        Args:
            notice_s: how long ``ray start`` may take to notice a lost process and to name it.
        """
        lost = self._lost_process()
        if self.process.poll() is None and not lost:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(notice_s)
        code = self.process.poll()
        return f"its {lost} is gone" if code is None else describe_end(self.last_lines(), code)

    def watch_processes(self) -> None:
        """Let ``describe_end`` notice a lost process before ``ray start`` does."""
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            for child in psutil.Process(self.process.pid).children():
                if child.pid not in self._vital and (name := child.name()) in _VITAL:
                    self._vital[child.pid] = os.pidfd_open(child.pid), name

    def _lost_process(self) -> str:
        """Return the name of a vital process that has ended; "" if all run."""
        vital = select.poll()  # a call's own: several threads ask, and a poll object serves one
        names = dict(tuple(self._vital.values()))
        for descriptor in names:
            vital.register(descriptor, select.POLLIN)
        return next((names[descriptor] for descriptor, _ in vital.poll(0)), "")

    def close(self) -> None:
        """End all processes at once; idempotent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()
        while self._vital:
            os.close(self._vital.popitem()[1][0])
        if self._folder is not None:
            _remove(self._folder)


def start_head(
    options: Mapping[str, Any], *, role: Literal["local", "head"], token: str
) -> tuple[RayNode, str]:
    """Start the head of a cluster, and only the processes that it needs.

    It gets a new folder, because ``address="auto"`` finds other clusters by their folder. Ray lets
    everybody write to its folder, so that it is within another one.

    Args:
        options: see ``RayNode``; ``temp_dir`` is the folder in which the new one is made.

    Returns:
        the node and its address.

    Raises:
        RayNodeError: Ray does not start, or does not accept the options.
    """
    own_folder = _make_folder(options.get("temp_dir"))
    folder = own_folder / "ray"
    defaults = {
        "port": _free_port(),
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,  # the autoscaler
    }
    if not options.get("include_dashboard"):
        defaults["dashboard_port"] = 0  # any free one: its process is started in any case
    own = {"head": True, "temp_dir": folder}
    node = RayNode(defaults | dict(options) | own, role=role, token=token, folder=own_folder)
    file = folder / _ADDRESS_FILE
    next_look = 0.0
    try:
        while not (address := file.read_text() if file.exists() else ""):
            if time.monotonic() >= next_look:
                node.watch_processes()
                next_look = time.monotonic() + _LOOK_S
            if end := node.describe_end(notice_s=_START_NOTICE_S):
                code = node.process.poll()
                said = node.last_lines()[-1:] if code is not None else []
                raise RayNodeError("".join(said) or end, is_usage=code == _USAGE_CODE)
            time.sleep(_POLL_S)
    except BaseException:
        node.close()
        raise
    node.watch_processes()
    return node, address.strip()


def _make_folder(parent: Path | str | None) -> Path:
    """Make a folder in ``parent``, by default in the system's folder for temporary files if the
    paths of sockets fit there.
    """
    place = tempfile.gettempdir() if parent is None else parent
    if parent is None and len(os.fsencode(place)) + len(_LONGEST_SOCKET) > _MAX_SOCKET_BYTES:
        logger.warning(
            "%s: its path is too long for Ray's sockets, which are in %s", place, _SHORT_FOLDER
        )
        place = _SHORT_FOLDER
    try:
        return Path(tempfile.mkdtemp(prefix="tandem-ray-", dir=place))
    except OSError as error:
        raise RayNodeError(str(error), is_usage=parent is not None) from None


def _remove(folder: Path) -> None:
    """Remove a folder to which processes that are ending may still write.

    What cannot be removed in time is left.
    """
    deadline = time.monotonic() + _REMOVAL_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        shutil.rmtree(folder, ignore_errors=True)


def describe_end(lines: Sequence[str], code: int) -> str:
    """Return which process ended first, from the last lines and the exit code of ``ray start``."""
    first = next(filter(None, map(_FIRST_EXIT.search, lines)), None)
    name, number = ("raylet or head", code) if first is None else (first[1], int(first[2]))
    known = {one.value: one.name for one in signal.Signals}
    how = f"ended with exit code {number}"
    if number < 0:
        how = f"was killed by {known.get(-number, f'signal {-number}')}"
    return f"its {name} {how}"


def address_here(host: str) -> str:
    """Return the IP address of a host name if it is this node's, else ""."""
    try:
        address = socket.gethostbyname(host)
        socket.create_server((address, 0)).close()
    except OSError:
        return ""
    return address


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if name in _SWITCHES:
        return flag if value else ""
    if name == "labels":
        return f"{flag}={','.join(f'{key}={label}' for key, label in value.items())}"
    return f"{flag}={json.dumps(value) if isinstance(value, Mapping) else value}"


def _free_port() -> int:
    """Return a free port of ``_PORTS``. Raise RayNodeError if there is none."""
    for port in random.SystemRandom().sample(_PORTS, k=len(_PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise RayNodeError(f"no port of {_PORTS.start} to {_PORTS.stop - 1} is free")
