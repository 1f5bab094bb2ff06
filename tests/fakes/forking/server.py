# SPDX-License-Identifier: Apache-2.0
"""Workers of Ray that are forked from a process that has imported what they import.

A fresh worker takes four seconds of processor time for imports, and a forked one some tenths. It
runs the same file of Ray with the same arguments, environment, folder and descriptors. Two things
differ. Its parent is this server: it dies when the process dies that Ray started in its place
(``interpreter.py``). And torch is imported before the process is isolated to its device.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from tandem.runtime.os_settings import no_collection
from tests.fakes.forking import interpreter
from tests.fakes.preloading import extend_path, with_preloaded

PRELOADED = ("tandem.runtime.worker_process", "tandem.workers.worker", "torch._dynamo")
"""Imported when the first worker is asked for. Not ray, which reads its settings from the
environment when it is imported."""
_REAP_S = 0.5


@dataclass(frozen=True)
class Forking:
    """A server that runs.

    Attributes:
        executable: the interpreter of a driver whose workers are forked.
        environment: the variables by which it finds the server.
    """

    executable: str
    environment: dict[str, str]


@cache
def start_forking() -> Forking:
    """Start the server of this process, with which it ends."""
    folder = Path(tempfile.mkdtemp(prefix="forking-"))
    wrapper, address = folder / "python", str(folder / "socket")
    command = [sys.executable, "-IS", interpreter.__file__, str(wrapper)]
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    wrapper.chmod(0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()
    reading, _ = os.pipe()  # the other end closes with this process
    subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.forking.server", str(listener.fileno())],
        cwd=Path(__file__).parents[3],
        stdin=reading,
        pass_fds=[listener.fileno()],
    )
    listener.close()
    os.close(reading)
    return Forking(str(wrapper), {interpreter.SOCKET: address})


def serve(listener: socket.socket) -> None:
    """Fork a worker for each connection, until standard input is closed."""
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [], _REAP_S)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if sys.stdin in ready:
            return shutil.rmtree(Path(listener.getsockname()).parent)
        if listener in ready:
            connection, _ = listener.accept()
            _preload()
            if not os.fork():
                listener.close()
                _become_worker(connection)
            connection.close()


@cache
def _preload() -> None:
    with no_collection():
        for name in with_preloaded(PRELOADED):
            import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork takes only the thread that forks"


def _become_worker(connection: socket.socket) -> None:
    """Run what the process at the other end of the connection would."""
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(12))
    descriptors = array.array("i", ancillary[0][2])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with connection.makefile() as lines:
        said = json.loads(lines.readline())
    # The kernel kills this process when the other end closes, whatever its threads do.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if not _is_open(connection):
        os._exit(1)
    os.chdir(said["folder"])
    os.environ.clear()
    os.environ.update(said["environment"])
    sys.argv = said["arguments"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    extend_path(os.environ)
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
