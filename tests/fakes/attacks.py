# SPDX-License-Identifier: Apache-2.0
"""Programs that try what code of a model must not do, and one that does honest work.

Each prints one JSON list, whose first item tells what it achieved. They are harmless outside of a
jail: bounded, and aimed at planted victims. ``fill`` sets the names in ``@``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_START = """
import ctypes, json, os, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
achieved = []
def attempt(name, action):
    try:
        action()
        achieved.append(name)
    except Exception:
        pass
def reaches(name, *call):
    ctypes.set_errno(0)
    if libc.syscall(*call) >= 0 or ctypes.get_errno() not in (1, 38):
        achieved.append(name)
"""
_END = """
print(json.dumps(["escaped" if achieved else "held", achieved]))
"""

ESCAPES = {
    "tcp to the host": """
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", @TCP@), 2).recv(16))
""",
    "udp and netlink": """
for family, kind in ((2, 2), (10, 2), (16, 3), (38, 5), (17, 3), (40, 1)):
    attempt(family, lambda: socket.socket(family, kind))
""",
    "unix socket of the host": """
attempt("connect", lambda: socket.socket(socket.AF_UNIX).connect("@UNIX@"))
""",
    "datagram through a pair of sockets": """
def send():
    mine, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    mine.sendto(b"escaped", "@DATAGRAM@")
attempt("datagram", send)
""",
    "write to disk": """
for folder in ("/tmp", "/root", "/etc", "/dev/shm", "/var/tmp", "/run", "@FOLDER@", "."):
    attempt(folder, lambda: open(folder + "/jail_escape", "w"))
attempt("open for writing", lambda: open("@OWN@", "a"))
""",
    "change files without writing": """
attempt("chmod", lambda: os.chmod("@OWN@", 0o777))
attempt("utime", lambda: os.utime("@OWN@"))
attempt("truncate", lambda: os.truncate("@OWN@", 0))
attempt("unlink", lambda: os.unlink("@OWN@"))
attempt("rename", lambda: os.rename("@OWN@", "@OWN@2"))
attempt("link", lambda: os.link("@OWN@", "@FOLDER@/link"))
attempt("xattr", lambda: os.setxattr("@OWN@", "user.x", b"1"))
""",
    "read secrets": """
for path in ("@SECRET@", "@OWN@", "/etc/shadow", "/etc/passwd", "/proc/1/environ", "@CODE@"):
    attempt(path, lambda: open(path, "rb").read(1))
attempt("environment", lambda: os.environ["JAIL_SECRET"])
""",
    "proc of the parent": """
for pid in (os.getppid(), @VICTIM@, "self"):
    for name in ("environ", "maps", "mem", "cmdline"):
        attempt(f"{pid}:{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    attempt(f"{pid}:fd", lambda: os.listdir(f"/proc/{pid}/fd"))
attempt("processes", lambda: os.listdir("/proc"))
""",
    "signals": """
for pid in (@VICTIM@, os.getppid(), -1, 0):
    attempt(pid, lambda: os.kill(pid, 0))
attempt("parent's end", lambda: 1 / (libc.prctl(1, 0, 0, 0, 0) + 1))
attempt("session", os.setsid)
""",
    "signal through a descriptor": """
import fcntl
reader, writer = os.pipe()
attempt("owner", lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, @VICTIM@))
attempt("number", lambda: fcntl.fcntl(reader, 10, 9))
mine, other = socket.socketpair()
attempt("ioctl", lambda: fcntl.ioctl(mine, 0x8901, struct.pack("i", @VICTIM@)))
""",
    "priority and limits of others": """
import resource
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, @VICTIM@, 19))
attempt("cores", lambda: os.sched_setaffinity(@VICTIM@, {0}))
attempt("limits", lambda: resource.prlimit(@VICTIM@, resource.RLIMIT_NOFILE))
attempt("own limits", lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))
""",
    "ptrace and memory of others": """
if libc.ptrace(16, @VICTIM@, 0, 0) == 0:
    libc.ptrace(17, @VICTIM@, 0, 0)
    achieved.append("ptrace")
if libc.process_vm_readv(@VICTIM@, None, 0, None, 0, 0) == 0:
    achieved.append("process_vm_readv")
""",
    "shared memory and queues": """
if libc.shmget(0, 4096, 0o1600) >= 0: achieved.append("shmget")
if libc.semget(0, 1, 0o1600) >= 0: achieved.append("semget")
if libc.msgget(0, 0o1600) >= 0: achieved.append("msgget")
if libc.shmctl(@SHARED@, 0, None) == 0:
    achieved.append("shmctl")
from multiprocessing.shared_memory import SharedMemory
attempt("shared memory", lambda: SharedMemory("jail_escape", create=True, size=16))
""",
    "programs": """
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
if os.system("true 2>/dev/null") == 0: achieved.append("system")
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
attempt("subprocess", lambda: __import__("subprocess").run(["/bin/true"]))
""",
    "daemon that outlives": """
def become_daemon():
    if os.fork() == 0:
        os.setsid()
        time.sleep(20)
        os._exit(0)
attempt("daemon", become_daemon)
""",
    "privileges": """
if libc.unshare(0x10000000) == 0: achieved.append("user namespace")
if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) == 0: achieved.append("mount")
if libc.chroot(b"/") == 0: achieved.append("chroot")
for change in (os.setuid, os.setgid):
    attempt(change.__name__, lambda: change(0))
for path in ("/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/tty", "/sys/kernel/debug"):
    attempt(path, lambda: open(path, "rb").read(1))
attempt("mknod", lambda: os.mknod("@FOLDER@/node", 0o600 | 0o060000, os.makedev(254, 0)))
for name, number in (("userfaultfd", 323), ("perf_event_open", 298), ("io_uring_setup", 425),
                     ("a call of the future", 5000)):
    if sys.maxsize > 2**32 and os.uname().machine == "x86_64":
        reaches(name, number, 0, 0, 0, 0, 0)
""",
}
"""Programs that must print ["held", []]."""

BOUNDED = {
    "fork many": (
        """
number = 0
try:
    for _ in range(300):
        if os.fork() == 0:
            time.sleep(20); os._exit(0)
        number += 1
except OSError: pass
print(json.dumps(["processes", number]))
""",
        ["processes", 0],
    ),
    "memory": (
        """
blocks, number = [], 0
try:
    for _ in range(24):
        blocks.append(bytearray(64 << 20)); number += 64
except MemoryError: pass
print(json.dumps(["MiB", number]))
""",
        ["MiB", 448],
    ),
    "memory of many children": (
        """
number = 0
try:
    for _ in range(6):
        if os.fork() == 0:
            keep = bytearray(320 << 20); time.sleep(4); os._exit(0)
        number += 1
except OSError: pass
print(json.dumps(["children", number]))
""",
        ["children", 0],
    ),
    "memory without a process": (
        """
number = 0
try:
    for _ in range(8):
        os.write(os.memfd_create("x"), b"x" * (32 << 20)); number += 32
except OSError: pass
print(json.dumps(["MiB", number]))
""",
        ["MiB", 0],
    ),
    "honest work": (
        """
import collections, decimal, fractions, itertools, math, random, re, statistics
print(json.dumps(["ok", math.comb(40, 20), str(fractions.Fraction(1, 3) + 1), 2 ** 200 % 97]))
""",
        ["ok", 137846528820, "4/3", 62],
    ),
}
"""Name -> the program, and the list that it must print with a limit of 512 MiB."""

ENDLESS = {
    "endless loop": ("while True: pass", "time"),
    "endless sleep, deaf": (
        "for s in range(1, 32):\n    attempt(s, lambda: signal.signal(s, signal.SIG_IGN))\n"
        "while True: time.sleep(1)",
        "time",
    ),
    "much output": ("while True: sys.stdout.write('x' * 100000)", "output"),
}
"""Name -> the program, and the way in which it must end."""


def programs() -> dict[str, str]:
    """Return all programs by name, with their common beginning and end."""
    found = {name: _START + text + _END for name, text in ESCAPES.items()}
    found |= {name: _START + text for name, (text, _) in BOUNDED.items()}
    return found | {name: _START + text for name, (text, _) in ENDLESS.items()}


def fill(text: str, values: Mapping[str, object]) -> str:
    """Replace ``@NAME@`` in a program."""
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def last_list(output: str) -> Any:
    """Return the list that a program printed last, None if it printed none."""
    lines = [line for line in output.splitlines() if line.startswith("[")]
    return json.loads(lines[-1]) if lines else None
