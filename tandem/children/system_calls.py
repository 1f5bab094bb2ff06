# SPDX-License-Identifier: Apache-2.0
"""The kernel calls that a jailed program may not make, and the filter (seccomp) that refuses them.

A refused call fails with EPERM, which Python raises as PermissionError. The filter reads numbers
and arguments of calls, and no memory: what paths may be opened is Landlock's part (``jail``). Calls
that are newer than this table fail with ENOSYS. Numbers are those of x86_64 and aarch64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

MACHINES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Name of the machine -> number of its architecture in the records that the filter reads."""

Pair = tuple[int | None, int | None]
Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant."""

_REFUSED_TEXT = """
socket 41 198  connect 42 203  bind 49 200  listen 50 201
fork 57 -  vfork 58 -  execve 59 221  execveat 322 281  setsid 112 157  setpgid 109 154
tkill 200 130  pidfd_open 434 434  pidfd_getfd 438 438  pidfd_send_signal 424 424
ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  kcmp 312 272
process_madvise 440 440  process_mrelease 448 448  migrate_pages 256 238  move_pages 279 239
setpriority 141 140  ioprio_set 251 30  sched_setparam 142 118  sched_setscheduler 144 119
sched_setaffinity 203 122  sched_setattr 314 274
chmod 90 -  fchmod 91 52  fchmodat 268 53  fchmodat2 452 452
chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54
setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15
fremovexattr 199 16  utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88
truncate 76 45  link 86 -  linkat 265 37  symlink 88 -  symlinkat 266 36
mknod 133 -  mknodat 259 33  chroot 161 51  sync 162 81  syncfs 306 267
inotify_add_watch 254 27  fanotify_init 300 262  fanotify_mark 301 263
name_to_handle_at 303 264  open_by_handle_at 304 265  lookup_dcookie 212 18
memfd_create 319 279  memfd_secret 447 447
shmget 29 194  shmat 30 196  shmctl 31 195  shmdt 67 197
semget 64 190  semop 65 193  semctl 66 191  semtimedop 220 192
msgget 68 186  msgsnd 69 189  msgrcv 70 188  msgctl 71 187  mq_open 240 180  mq_unlink 241 181
setuid 105 146  setgid 106 144  setreuid 113 145  setregid 114 143  setgroups 116 159
setresuid 117 147  setresgid 119 149  setfsuid 122 151  setfsgid 123 152  capset 126 91
unshare 272 97  setns 308 268  mount 165 40  umount2 166 39  pivot_root 155 41
open_tree 428 428  move_mount 429 429  fsopen 430 430  fsconfig 431 431  fsmount 432 432
fspick 433 433  mount_setattr 442 442  quotactl 179 60  quotactl_fd 443 443  acct 163 89
swapon 167 224  swapoff 168 225  sethostname 170 161  setdomainname 171 162  vhangup 153 58
settimeofday 164 170  clock_settime 227 112  adjtimex 159 171  clock_adjtime 305 266
reboot 169 142  kexec_load 246 104  kexec_file_load 320 294  init_module 175 105
finit_module 313 273  delete_module 176 106  syslog 103 116  personality 135 92
ioperm 173 -  iopl 172 -  modify_ldt 154 -  uselib 134 -  ustat 136 -  sysfs 139 -
bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  keyctl 250 219  add_key 248 217
request_key 249 218  io_uring_setup 425 425  io_uring_enter 426 426  io_uring_register 427 427
"""


def _parse(text: str) -> dict[str, Pair]:
    words = text.split()
    numbers = [None if word == "-" else int(word) for word in words if word[0] in "-0123456789"]
    names = [word for word in words if word[0] not in "-0123456789"]
    return {name: (numbers[2 * i], numbers[2 * i + 1]) for i, name in enumerate(names)}


REFUSED: Mapping[str, Pair] = _parse(_REFUSED_TEXT)
"""Calls that are always refused -> their numbers on x86_64 and aarch64; None: it has none."""

TO_ITSELF: Mapping[str, Pair] = {
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
}
"""Calls whose first argument must be the process's own number. It never changes without forks."""

REFUSED_VALUES: Mapping[str, tuple[Pair, int, tuple[int, ...]]] = {
    # A signal of any number reaches the owner of a descriptor: SETOWN, SETSIG, SETOWN_EX.
    "fcntl": ((72, 25), 1, (8, 10, 15)),
    # The same for sockets and terminals (FIOSETOWN, SIOCSPGRP, FIOASYNC), and typing into a
    # terminal (TIOCSTI, TIOCLINUX, TIOCSCTTY).
    "ioctl": ((16, 29), 1, (0x8901, 0x8902, 0x5452, 0x5412, 0x541C, 0x540E)),
    # The signal at the parent's end, DUMPABLE, the memory map, and the permission to trace.
    "prctl": ((157, 167), 0, (1, 4, 35, 0x59616D61)),
}
"""Calls of which an argument, by its index, may not have some values."""

PRLIMIT: Pair = (302, 261)
SOCKETPAIR: Pair = (53, 199)
CLONE: Pair = (56, 220)
CLONE3: Pair = (435, 435)
FIRST_UNKNOWN = 457
"""The first number of calls that did not exist when this table was written."""

_X32 = 0x40000000
_THREAD, _NAMESPACES = 0x10000, 0x7E020000
_UNIX, _STREAM, _KIND_MASK = 1, 1, 0xF
_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCHITECTURE = 0, 4


def filter_program(machine: str, *, own_pid: int) -> bytes:
    """Return the filter as the kernel takes it: 8 bytes for each instruction.

    Args:
        machine: a key of ``MACHINES``.
        own_pid: the number of the process that the filter is for.
    """
    instructions = build_filter(machine, own_pid=own_pid)
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def build_filter(machine: str, *, own_pid: int) -> list[Instruction]:
    """Return the instructions of the filter; see ``filter_program``."""
    column = list(MACHINES).index(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # a second table of calls, of programs with short pointers
        program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    program += [(_AT_LEAST, 0, 1, FIRST_UNKNOWN), (_RETURN, 0, 0, _ERROR | _ENOSYS)]
    for block in _blocks(column, own_pid):
        program += block
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _blocks(column: int, own_pid: int) -> Iterator[list[Instruction]]:
    """Yield parts of the program, each for the calls of one number; the others pass through."""
    refuse, allow = (_RETURN, 0, 0, _ERROR | _EPERM), (_RETURN, 0, 0, _ALLOW)
    for pair in REFUSED.values():
        yield from _for_call(pair[column], [refuse])
    for pair in TO_ITSELF.values():
        own = [_load(0), (_EQUAL, 1, 0, own_pid), refuse, allow]
        yield from _for_call(pair[column], own)
    for pair, index, values in REFUSED_VALUES.values():
        tests = [one for value in values for one in ((_EQUAL, 0, 1, value), refuse)]
        yield from _for_call(pair[column], [_load(index), *tests, allow])
    limits = [_load(0), (_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, own_pid), refuse, allow]
    yield from _for_call(PRLIMIT[column], limits)
    # A datagram socket of a pair could send to any path; a stream cannot.
    is_stream = [_load(1), (_AND, 0, 0, _KIND_MASK), (_EQUAL, 1, 0, _STREAM), refuse, allow]
    pair_of = [_load(0), (_EQUAL, 1, 0, _UNIX), refuse, *is_stream]
    yield from _for_call(SOCKETPAIR[column], pair_of)
    # The flags of clone3 lie in memory. Without it, the C library uses clone.
    yield from _for_call(CLONE3[column], [(_RETURN, 0, 0, _ERROR | _ENOSYS)])
    is_thread = [(_ANY_BIT, 0, 1, _NAMESPACES), refuse, (_ANY_BIT, 1, 0, _THREAD), refuse, allow]
    yield from _for_call(CLONE[column], [_load(0), *is_thread])


def _for_call(number: int | None, then: list[Instruction]) -> Iterator[list[Instruction]]:
    """Yield ``then``, which returns, behind a jump that other numbers take."""
    if number is not None:
        yield [(_EQUAL, 0, len(then), number), *then]


def _load(argument: int) -> Instruction:
    """Return the load of the lower half of an argument."""
    return (_LOAD, 0, 0, 16 + 8 * argument)
