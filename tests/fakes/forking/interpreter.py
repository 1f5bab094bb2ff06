# SPDX-License-Identifier: Apache-2.0
"""The interpreter that a driver has instead of its own: it asks a server to fork Ray's workers.

The driver runs a script of the server, which runs this file without any packages, as ``python -IS
interpreter.py SCRIPT ARGUMENTS``. Whatever is not a worker is run by the usual interpreter.
"""

import array
import json
import os
import select
import socket
import sys

SOCKET = "TANDEM_TEST_FORKING"
"""The variable with the address of the server."""
WORKER = "/ray/_private/workers/default_worker.py"
RAY_START = "from ray.scripts.scripts import main"


def run(script: str, arguments: list[str]) -> None:
    """Do what an interpreter would that was started with ``arguments``."""
    if arguments[:1] == ["-c"] and RAY_START in arguments[1]:
        # Ray starts workers with the interpreter that it is run by.
        arguments[1] = f"import sys; sys.executable = {script!r}; {arguments[1]}"
    if arguments[0].endswith(WORKER):
        stay_for(fork(arguments))
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def fork(arguments: list[str]) -> socket.socket:
    """Let the server fork a worker with the descriptors, folder and environment of this process.

    The other end of the connection is the worker's, and closes when it ends.
    """
    said = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(os.environ[SOCKET])
    descriptors = array.array("i", [0, 1, 2])
    connection.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    connection.sendall(json.dumps(said).encode() + b"\n")
    return connection


def stay_for(connection: socket.socket) -> None:
    """Stay until the worker has ended, or the process that started this one: then the worker ends
    because its connection does."""
    parent = os.pidfd_open(os.getppid())
    select.select([connection, parent], [], [])


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
