# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a child process that computes something with limits: its life and channel.

Messages to the child are bytes with a length before them; the child answers with lines. Nothing
that a child writes is unpickled. Each process is a fresh interpreter (about 60 ms): it neither
forks a process that holds a device nor imports the main program again. It leads a process group of
its own, which is killed as a whole, and ends with this process (``child``). The listener interprets
the messages and enforces time limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem.children.child import LENGTH_BYTES

# SIGINT ends the process without a traceback, before slower modules than ``_signal`` are imported.
# One thread: several processes run, and each thread of a math library allocates tens of MiB.
_BOOTSTRAP = (
    "import _signal; _signal.signal(_signal.SIGINT, _signal.SIG_DFL); "
    "import importlib, json, os, sys; os.environ.setdefault('OMP_NUM_THREADS', '1'); "
    "own, folders = json.loads(sys.argv[1]); "
    "sys.path[:] = [*folders, *filter(None, sys.path)] if own else folders; "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]), int(sys.argv[4]))"
)
_READ_BYTES = 1 << 16
_EXIT_WAIT_S = 10.0


class ChildListener(Protocol):
    """The receiver of what a child process writes."""

    def on_lines(self, lines: list[bytes]) -> None:
        """Handle complete lines, without their ends."""
        ...

    def on_exit(self) -> None:
        """Handle the end of the process, which has closed its channel."""
        ...


class ChildProcess:
    """A child process with its event-loop callbacks. ``send`` need not wait until it is ready.

    Args:
        module: the module whose ``main(channel_fd, lifeline_fd)`` is the program.
        environment: all environment variables of the process.
    """

    def __init__(
        self, module: str, listener: ChildListener, *, environment: Mapping[str, str]
    ) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = b"", bytearray()
        self._lifeline_fd: int | None
        self._socket, self._lifeline_fd, self._process = start_interpreter(
            module, environment=environment
        )
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)

    @property
    def is_killed(self) -> bool:
        """Whether ``kill`` was called."""
        return self._lifeline_fd is None

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages as far as the channel takes them, and the rest when it is free."""
        for message in messages:
            self._outgoing += len(message).to_bytes(LENGTH_BYTES, "big") + message
        self._flush()

    def kill(self) -> None:
        """Kill the process and all its children without waiting; idempotent."""
        if self._lifeline_fd is None:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()
        os.close(self._lifeline_fd)
        self._lifeline_fd = None

    def reap(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for the killed process; return whether it is gone."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def describe_end(self) -> str:
        """Kill the children of a process that has ended; return how it ended."""
        self.kill()
        self.reap(_EXIT_WAIT_S)
        code = self._process.returncode
        if code is not None and code < 0:
            return f"process killed by {signal.Signals(-code).name}"
        return "process ended" if code is None else f"process ended with exit code {code}"

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except ConnectionError:
            self._outgoing.clear()  # the process died; _receive will handle that
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._listener.on_exit()
            return
        *lines, self._incoming = (self._incoming + received).split(b"\n")
        if lines:
            self._listener.on_lines(lines)


def _output(number: int) -> int | None:
    """Return None for a standard stream that a child can have, else what stands for nothing.

    If the caller has closed the stream, this process may have opened another file by its number.
    """
    try:
        return None if os.get_inheritable(number) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def start_interpreter(
    module: str,
    *,
    environment: Mapping[str, str],
    interpreter: str = sys.executable,
    path: Sequence[str] | None = None,
    descriptors: Sequence[int] = (),
    log_fd: int | None = None,
) -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    """Start ``module.main(channel_fd, lifeline_fd)`` in a process group of its own.

    Args:
        path: folders of modules that precede the interpreter's own; None: this process's
            ``sys.path`` in place of them.
        descriptors: open descriptors that keep their numbers in the process.
        log_fd: the file that its output goes to; None: the output of this process.

    Returns:
        our end of its channel, the descriptor whose end kills it, and the process.
    """
    ours, theirs = socket.socketpair()
    their_lifeline_fd, lifeline_fd = os.pipe()
    own = (theirs.fileno(), their_lifeline_fd)
    folders = json.dumps([False, sys.path] if path is None else [True, list(path)])
    try:
        process = subprocess.Popen(
            [interpreter, "-c", _BOOTSTRAP, folders, module, *map(str, own)],
            stdin=subprocess.DEVNULL,
            stdout=_output(1) if log_fd is None else log_fd,
            stderr=_output(2) if log_fd is None else log_fd,
            env=environment,
            pass_fds=(*own, *descriptors),
            start_new_session=True,
        )
    finally:
        theirs.close()
        os.close(their_lifeline_fd)
    return ours, lifeline_fd, process
