# SPDX-License-Identifier: Apache-2.0
"""The trial of the jail: which protections hold on this machine, found by attempts inside of it.

A child of this process puts on each layer, another one enters the whole jail and tries what a
program must not do. Nothing is assumed from versions. The attempts change nothing where they
succeed. This process must have one thread, because it forks.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.children.jail import (
    JailLimits,
    Layers,
    become_other_user,
    change_root,
    enter,
    filter_calls,
    is_known_machine,
    landlock_version,
)

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER_NAMESPACE, _GET_NO_NEW_PRIVS = 0x10000000, 39
_TRIAL_LIMITS = JailLimits(cpu_s=5)
_ANSWER_BYTES = 1 << 12
NEEDED = ("files", "network", "processes", "signals")
"""The protections without which code of a model is not executed, unless a user asks for it."""


@dataclass(frozen=True, slots=True)
class Protection:
    """A promise of the jail, and what keeps it on this machine.

    Attributes:
        name: one word.
        promise: what a jailed program cannot do.
        held_by: the mechanism; "" if nothing holds it here.
    """

    name: str
    promise: str
    held_by: str


def find_layers() -> Layers:
    """Return the layers that processes forked from this one can put on."""
    if not is_known_machine():
        return Layers(user=False, landlock=0, seccomp=False)
    is_root, landlock = os.geteuid() == 0, landlock_version()
    return Layers(
        user=is_root and _works(_change_user),
        landlock=landlock,
        seccomp=_works(filter_calls),
        chroot=is_root and not landlock and _works(change_root),
    )


def try_protections(layers: Layers, readable: tuple[str, ...]) -> tuple[Protection, ...]:
    """Enter the jail in a child, try what it must prevent, and return what holds."""
    held: Mapping[str, bool] = {}
    if is_known_machine():
        held = _held_in_child(layers, readable)
    filtered = "seccomp" if layers.seccomp else ""
    landlock = f"Landlock (version {layers.landlock})"
    around = "chroot" * layers.chroot if not layers.landlock else landlock
    files = ", ".join(one for one in (around, filtered, "own user" * layers.user) if one)
    signals = ", ".join(one for one in (filtered, landlock * (layers.landlock >= 6)) if one)
    told = (
        ("files", "read files other than Python's modules, or write any", files),
        ("network", "open sockets to this or another machine", filtered),
        ("processes", "start processes or programs", filtered),
        ("signals", "send signals to other processes", signals),
        ("tracing", "read or change the memory of other processes", filtered),
        ("memory", "use more memory than its limit", "rlimits"),
        ("time", "use more processor time than its limit", "rlimits, deadline"),
        ("privileges", "gain rights, or reach rarely used parts of the kernel", filtered),
    )
    return tuple(
        Protection(name, promise, held_by if held.get(name) else "")
        for name, promise, held_by in told
    )


def lost_protections(protections: tuple[Protection, ...]) -> tuple[Protection, ...]:
    """Return what must hold for code of a model, and does not."""
    return tuple(one for one in protections if one.name in NEEDED and not one.held_by)


def _held_in_child(layers: Layers, readable: tuple[str, ...]) -> dict[str, bool]:
    ours, theirs = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            enter(_TRIAL_LIMITS, layers, parent=parent, readable=readable)
            os.write(
                theirs,
                json.dumps({name: not escapes() for name, escapes in _ESCAPES.items()}).encode(),
            )
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as answer:
        text = answer.read(_ANSWER_BYTES)
    os.waitpid(child, 0)
    return json.loads(text) if text else {}


def _works(attempt: Callable[[], object]) -> bool:
    """Return whether an attempt succeeds in a child, which ends with it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            attempt()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def _change_user() -> None:
    """Change the user, and read a module: an interpreter in a home folder cannot be read then."""
    become_other_user()
    os.close(os.open(os.__file__, os.O_RDONLY))


def _escapes(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _escapes_files() -> bool:
    return any(
        _escapes(attempt)
        for attempt in (
            lambda: os.listdir("/etc"),
            lambda: os.open("/proc/version", os.O_RDONLY),
            lambda: os.open("/tmp", os.O_TMPFILE | os.O_WRONLY),
            lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_WRONLY),
            lambda: os.utime("/dev/null", None),
        )
    )


def _escapes_processes() -> bool:
    def attempt() -> None:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)

    return _escapes(attempt)


def _escapes_memory() -> bool:
    return _escapes(lambda: mmap.mmap(-1, _TRIAL_LIMITS.memory_bytes).close())


def _escapes_time() -> bool:
    return resource.getrlimit(resource.RLIMIT_CPU)[0] > _TRIAL_LIMITS.cpu_s


def _gains_privileges() -> bool:
    has_new = _LIBC.prctl(_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1
    return has_new or _LIBC.unshare(_NEW_USER_NAMESPACE) == 0


_ESCAPES: Mapping[str, Callable[[], bool]] = {
    "files": _escapes_files,
    "network": lambda: _escapes(lambda: socket.socket().close()),
    "processes": _escapes_processes,
    "signals": lambda: _escapes(lambda: os.kill(os.getppid(), 0)),
    # With nothing to read, it succeeds wherever it is permitted.
    "tracing": lambda: _LIBC.process_vm_readv(os.getppid(), None, 0, None, 0, 0) == 0,
    "memory": _escapes_memory,
    "time": _escapes_time,
    "privileges": _gains_privileges,
}
"""Name of a protection -> the attempt, which tells whether it got through."""
