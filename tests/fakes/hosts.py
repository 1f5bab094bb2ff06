# SPDX-License-Identifier: Apache-2.0
"""Two hosts made of network namespaces, connected by a cable that can be pulled."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SUBNET = "10.213.77"
_CLONE_NEWNET = 0x40000000


class NoNamespaces(Exception):
    """The error of a machine that may not make network namespaces."""


@dataclass(frozen=True)
class Hosts:
    """The names of the namespaces by node rank; the cable's ends have the same names."""

    names: tuple[str, str]

    def launch_variables(self, rank: int, *, port: int = 29713) -> dict[str, str]:
        """Return what a launcher sets on a node."""
        return {
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(port),
            "NODE_RANK": str(rank),
        }

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[1], "link", "set", self.names[1], "down")

    def connect(self) -> None:
        """Plug the cable in again."""
        ip("-n", self.names[1], "link", "set", self.names[1], "up")

    def processes(self, rank: int) -> list[int]:
        """Return the processes on a host."""
        done = ip("netns", "pids", self.names[rank])
        return [int(pid) for pid in done.split() if is_running(int(pid))]


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ip(*arguments: str) -> str:
    """Run the command ``ip`` and return its output."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def enter_host(name: str) -> None:
    """Move this thread, and what it starts, to a host."""
    with Path(f"/var/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), name)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two connected hosts, and end them with all their processes.

    Raises:
        NoNamespaces: that is not permitted here.
    """
    names = (f"ta{os.getpid()}", f"tb{os.getpid()}")
    if shutil.which("ip") is None:
        raise NoNamespaces("no ip command (iproute2) to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1],
           "netns", names[1])  # fmt: skip
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        reason = f"network namespaces are not permitted here: {error.stderr.strip()}"
        raise NoNamespaces(reason) from error
    for number, name in enumerate(names, start=1):
        ip("-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", name)
        ip("-n", name, "link", "set", name, "up")
        ip("-n", name, "link", "set", "lo", "up")
    try:
        yield Hosts(names)
    finally:
        for name in names:
            for pid in ip("netns", "pids", name).split():
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(pid)).kill()
            ip("netns", "delete", name)
