# SPDX-License-Identifier: Apache-2.0
"""The jail that a process puts on itself, for good, before it executes code of a model.

Its layers are limits of the kernel (rlimits), a user of its own if it was started by root, no
capabilities, Landlock (files, TCP, signals) and a filter of kernel calls (``system_calls``). No
rights are needed to enter it, so it works in containers and for ordinary users. Without Landlock,
root changes to an empty root folder. Linux on x86_64 and aarch64, standard library only. What holds
on a machine is found by trying (``jail_trial``). It is no defence against faults of the kernel,
against timing, or against the names of files.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.children.system_calls import MACHINES, filter_program

MIB = 1 << 20
_FIRST_USER, _NUM_USERS = 65_000, 500
"""Users that no distribution assigns. Two jailed processes of one user still hold apart."""
_MAX_THREADS, _MAX_FILES = 64, 64
_SETPCAP_DROP, _SET_DUMPABLE, _SET_PDEATHSIG, _SET_NO_NEW_PRIVS, _SET_SECCOMP = 24, 4, 1, 38, 22
_SECCOMP_FILTER, _SIGKILL, _NUM_CAPABILITIES = 2, 9, 64
_CAPABILITY_VERSION = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ABI_REQUEST, _RULE_PATH = 1, 1
_READ = 1 << 2 | 1 << 3
"""Landlock's rights to read files and to list folders; nothing may be executed or written."""
_READ_FILE = 1 << 2
_WRITE = sum(1 << bit for bit in (1, 2, 3, 4, 5, 7, 8))
"""Landlock's rights to read and write files, to make and remove files and folders, and no links."""
_MOVE, _TRUNCATE = 1 << 13, 1 << 14
_ALWAYS_READABLE = (
    *("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/usr/share/zoneinfo"),
    *("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero", "/dev/null"),
)

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class JailLimits:
    """The limits of one execution; ``memory_bytes`` is address space, the interpreter's included.

    ``scratch_bytes`` bounds each file of a program that has a folder to write to.

    Example:
        >>> JailLimits(wall_s=5.0).cpu_s
        10
    """

    cpu_s: int = 10
    wall_s: float = 30.0
    memory_bytes: int = 512 * MIB
    output_bytes: int = 1 << 16
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that processes of this interpreter can put on, as a trial found.

    Attributes:
        user: whether a process may change to a user of its own, and imports still work there.
        landlock: version of Landlock; 0 without it.
        seccomp: whether the kernel takes the filter.
        chroot: whether a process changes to an empty root folder, in place of Landlock. Modules
            that its interpreter has not imported are out of reach then.
    """

    user: bool
    landlock: int
    seccomp: bool
    chroot: bool = False


def enter(
    limits: JailLimits, layers: Layers, *, parent: int, readable: Sequence[str], scratch: str = ""
) -> None:
    """Put this process, which has one thread and was forked for this, into the jail.

    Args:
        parent: the process that has forked this one, and whose end shall be its own.
        readable: the files and folders that it may read.
        scratch: the folder that it may write to, which becomes its working folder; "" for none.

    Raises:
        OSError: a layer that was there in the trial could not be put on.
    """
    os.umask(0o077)
    os.chdir(scratch or "/")
    user = hand_over(scratch) if layers.user and scratch else None
    if layers.chroot:
        change_root(scratch)
    _set_limits(limits, has_own_user=layers.user)
    if layers.user:
        become_other_user(user)
    _drop_capabilities()
    _control(_SET_DUMPABLE, 0)
    _control(_SET_PDEATHSIG, _SIGKILL)  # after the change of user, which clears it
    if os.getppid() != parent:
        raise OSError("the parent has ended")
    _control(_SET_NO_NEW_PRIVS, 1)
    if layers.landlock:
        _restrict_files(layers.landlock, readable, scratch=scratch)
    if layers.seccomp:
        filter_calls()


def readable_paths(packages: Sequence[str]) -> tuple[str, ...]:
    """Return what a program may read: libraries, modules of this interpreter, and ``packages``."""
    return (*_ALWAYS_READABLE, os.path.dirname(os.__file__), *packages)


def landlock_version() -> int:
    """Return the version of the kernel's Landlock, 0 if it has none or refuses it."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, _ABI_REQUEST))


def become_other_user(user: int | None = None) -> None:
    """Change to ``user``, or to one that owns nothing; raise OSError if this process may not."""
    user = _own_user() if user is None else user
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def change_root(scratch: str = "") -> None:
    """Change the root folder to ``scratch``, or to a folder that is empty and cannot be written to.

    Raises:
        OSError: this process may not.
    """
    folder = scratch or tempfile.mkdtemp()
    try:
        os.chdir(folder)
    finally:
        if not scratch:
            os.rmdir(folder)  # the kernel makes no file in a folder that is removed
    os.chroot(".")


def _own_user() -> int:
    return _FIRST_USER + os.getpid() % _NUM_USERS


def hand_over(scratch: str) -> int:
    """Give a folder to the user of this execution, or keep that of an earlier one; return it."""
    owner = os.stat(scratch).st_uid
    if owner in range(_FIRST_USER, _FIRST_USER + _NUM_USERS):
        return owner
    user = _own_user()
    os.chown(scratch, user, user)
    return user


def _set_limits(limits: JailLimits, *, has_own_user: bool) -> None:
    wanted: Mapping[int, tuple[int, int]] = {
        # The signal of the soft limit tells that the time was used up.
        resource.RLIMIT_CPU: (limits.cpu_s, limits.cpu_s + 1),
        resource.RLIMIT_AS: (limits.memory_bytes, limits.memory_bytes),
        resource.RLIMIT_NOFILE: (_MAX_FILES, _MAX_FILES),
        resource.RLIMIT_FSIZE: (limits.scratch_bytes, limits.scratch_bytes),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    if has_own_user:  # else it would count all processes of the user
        wanted = {**wanted, resource.RLIMIT_NPROC: (_MAX_THREADS, _MAX_THREADS)}
    for kind, (soft, hard) in wanted.items():
        _, highest = resource.getrlimit(kind)
        most = hard if highest == resource.RLIM_INFINITY else min(hard, highest)
        resource.setrlimit(kind, (min(soft, most), most))


def _drop_capabilities() -> None:
    """Give up all capabilities for good. A root without any still owns root's files."""
    for capability in range(_NUM_CAPABILITIES):
        _LIBC.prctl(_SETPCAP_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if _LIBC.capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def _restrict_files(version: int, readable: Sequence[str], *, scratch: str) -> None:
    """Allow this process to read ``readable``, to write to ``scratch``, and nothing else.

    Other files, TCP ports and foreign processes are out of reach.
    """
    # Versions: 2 links between folders, 3 truncation, 4 TCP, 5 devices, 6 signals and sockets.
    rights = (1 << (13 + sum(version >= one for one in (2, 3, 5)))) - 1
    ports, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _checked(
        "landlock_create_ruleset",
        _LIBC.syscall(_CREATE_RULESET, struct.pack("=QQQ", rights, ports, scopes), size, 0),
    )
    writing = (_WRITE | _MOVE | _TRUNCATE) & rights
    for path in (*readable, *([scratch] if scratch else [])):
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # this machine has no such path
        reading = _READ if os.path.isdir(path) else _READ_FILE
        allowed = writing if path == scratch else reading
        rule = struct.pack("=Qi", allowed, place)
        _checked("landlock_add_rule", _LIBC.syscall(_ADD_RULE, ruleset, _RULE_PATH, rule, 0))
        os.close(place)
    _checked("landlock_restrict_self", _LIBC.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


class _FilterProgram(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def filter_calls() -> None:
    """Put the filter of kernel calls on this process; raise OSError if the kernel refuses it."""
    _control(_SET_NO_NEW_PRIVS, 1)
    program = filter_program(platform.machine(), own_pid=os.getpid())
    buffer = ctypes.create_string_buffer(program, len(program))
    record = _FilterProgram(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    pointer = ctypes.byref(record)
    _checked("seccomp", _LIBC.prctl(_SET_SECCOMP, _SECCOMP_FILTER, pointer, 0, 0))


def is_known_machine() -> bool:
    """Return whether the jail knows this machine's kernel calls."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def _control(option: int, value: int) -> None:
    _checked("prctl", _LIBC.prctl(option, value, 0, 0, 0))


def _checked(name: str, returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return returned
