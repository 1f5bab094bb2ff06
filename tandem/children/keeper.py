# SPDX-License-Identifier: Apache-2.0
"""The program between this process and a command of the user, which ends all that it has started.

Processes that a command starts may leave its process group and outlive it. This program becomes
their parent when that happens: it asks the kernel to be the reaper of its descendants (Linux). When
the command has ended, or the pipe from the parent has closed, it kills its children until it has
none, and ends as the command did. If it is killed itself, the kernel kills the command. It runs as
a script and imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress

_SET_PDEATHSIG, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 4, 36
_NOT_STARTED = 127
_READ_BYTES = 1 << 10
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)
"""The signals that Python ignores, and that a new program would ignore, too."""


def main(arguments: list[str]) -> None:
    """Run a command: the arguments are the descriptor of the pipe, and those of the command."""
    lifeline_fd, argv = int(arguments[0]), arguments[1:]
    os.set_inheritable(lifeline_fd, False)
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    changed_fd = _open_changes()
    pid = _start(argv, libc)
    for standard in (0, 1):
        os.close(standard)  # the pipes end with the command
    status = _wait(pid, changed_fd=changed_fd, lifeline_fd=lifeline_fd)
    status = _end_all(pid, status)
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def _start(argv: list[str], libc: ctypes.CDLL) -> int:
    """Start the command; return its process."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(_NOT_STARTED)
        os.setpgid(0, 0)  # a command that signals its group does not mean this program
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]} cannot be started: {error.strerror}\n".encode())
    finally:
        os._exit(_NOT_STARTED)


def _open_changes() -> int:
    """Return a pipe that can be read when a child has ended."""
    changed_fd, written_fd = os.pipe()
    for descriptor in (changed_fd, written_fd):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(written_fd, warn_on_full_buffer=False)
    return changed_fd


def _wait(pid: int, *, changed_fd: int, lifeline_fd: int) -> int:
    """Wait for the command or for the end of the pipe; return the status of the command, or 0."""
    poll = select.poll()
    for descriptor in (lifeline_fd, changed_fd):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if lifeline_fd in ready:
            return 0
        os.read(changed_fd, _READ_BYTES)
        # Others are processes that the command has left behind.
        while (change := os.waitpid(-1, os.WNOHANG))[0]:
            if change[0] == pid:
                return change[1]


def _end_all(pid: int, status: int) -> int:
    """Kill all descendants, and wait until they are gone; return the status of the command."""
    while True:
        for child in _children():
            with suppress(OSError):  # it may be gone, or run as another user
                os.kill(child, signal.SIGKILL)
        try:
            ended = os.wait()
        except ChildProcessError:
            return status
        if ended[0] == pid:
            status = ended[1]


def _children() -> list[int]:
    """Return the children of this process, which has one thread."""
    own = os.getpid()
    with open(f"/proc/{own}/task/{own}/children") as file:
        return [int(one) for one in file.read().split()]


def _end_by(number: int) -> None:
    """End this process by a signal, as the command did, without a core file."""
    with suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    libc = ctypes.CDLL(None)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main(sys.argv[1:])
