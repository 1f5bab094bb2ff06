# SPDX-License-Identifier: Apache-2.0
"""A command that torchrun started, with one process for each device of a node.

A run has a process of its own for each device, and one process drives them. Hence the process of
local rank 0 runs the command for all devices of its node. The others wait and exit with its exit
code. If one of them fails, torchrun ends the rest, as it does with any program.

The processes of a node meet at a socket that the kernel removes with its owner, so that an end by
any signal is noticed. They end with torchrun, whatever ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tandem.errors import NO_VALUE, UserError
from tandem.runtime.os_settings import die_with_parent

_RUN_ID = "TORCHELASTIC_RUN_ID"
_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130
_RETRY_S = 0.05
_LATE_S = 60.0
"""The longest time between the end of a process and the start of another one of the same launch."""


@dataclass(frozen=True, slots=True)
class LaunchedNode:
    """The place of this process in torchrun's launch.

    Attributes:
        local_rank: the number of this process on its node.
        num_processes: the number of processes on this node.
        restarts: the number of times that torchrun has started all processes anew.
        master_addr, master_port: the address of torchrun's store on the first node.
        has_store: whether torchrun itself serves the store, hence holds the port.
    """

    local_rank: int
    num_processes: int
    node_rank: int
    num_nodes: int
    restarts: int
    master_addr: str
    master_port: int
    has_store: bool

    @property
    def overrides(self) -> tuple[str, ...]:
        """The keys that torchrun's options set."""
        return (
            f"trainer.n_gpus_per_node={self.num_processes}",
            f"trainer.nnodes={self.num_nodes}",
        )

    @property
    def socket_name(self) -> str:
        """The address at which the processes of this node meet, in the kernel's name space."""
        launch = f"{self.master_addr}:{self.master_port}:{self.restarts}"
        return f"\0tandem-torchrun-{os.getuid()}-{launch}-{self.node_rank}"


def launched_node(environment: Mapping[str, str]) -> LaunchedNode | None:
    """Return the place of this process in torchrun's launch; None without torchrun.

    Raises:
        UserError: torchrun's environment variables are incomplete, or not what it sets.
    """
    if _RUN_ID not in environment:
        return None
    return LaunchedNode(
        local_rank=_number(environment, "LOCAL_RANK"),
        num_processes=_number(environment, "LOCAL_WORLD_SIZE"),
        node_rank=_number(environment, "GROUP_RANK"),
        num_nodes=_number(environment, "GROUP_WORLD_SIZE"),
        restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT"),
        master_addr=_variable(environment, "MASTER_ADDR"),
        master_port=_number(environment, "MASTER_PORT"),
        has_store=_variable(environment, "TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _variable(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        raise _not_torchruns(name, NO_VALUE, rule="is not set, which torchrun sets")
    return environment[name]


def _number(environment: Mapping[str, str], name: str) -> int:
    value = _variable(environment, name)
    if not (value.isascii() and value.isdigit()):
        raise _not_torchruns(name, value, rule="is not a number, which torchrun sets")
    return int(value)


def _not_torchruns(name: str, value: object, *, rule: str) -> UserError:
    remedy = f"Start the command with torchrun, or unset {_RUN_ID} to run it without torchrun."
    return UserError(f"environment variable {name}", value, rule=rule, remedy=remedy)


def run_as_launched(run: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """Run a command in this process, or wait for the one that runs it; return its exit code."""
    node = launched_node(os.environ)
    if node is None or node.num_processes == 1:
        return run(words)
    if node.local_rank == 0:
        return _lead(node, run, words=words)
    die_with_parent()
    try:
        return _follow(node)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def with_launched_devices(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command with the keys that torchrun's options set.

    Raises:
        UserError: an argument sets one of them to another value, or the nodes have different
            numbers of processes.
    """
    node = launched_node(os.environ)
    if node is None:
        return list(arguments)
    if node.num_nodes * node.num_processes != _number(os.environ, "WORLD_SIZE"):
        raise UserError(
            "torchrun --nproc_per_node",
            node.num_processes,
            rule=f"must be the same on each of the {node.num_nodes} nodes",
            remedy="Start the same command on every node.",
        )
    wanted = dict(override.split("=") for override in node.overrides)
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        if key in wanted and value != wanted[key]:
            raise UserError(
                key,
                value,
                rule=f"torchrun started {node.num_processes} process(es) on each of "
                f"{node.num_nodes} node(s)",
                remedy=f"Set {key}={wanted[key]}, or leave the key out.",
            )
    return [*arguments, *node.overrides]


def _lead(node: LaunchedNode, run: Callable[[Sequence[str]], int], *, words: Sequence[str]) -> int:
    die_with_parent(signal.SIGTERM)  # the run saves and stops
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(node.socket_name)
        server.listen(node.num_processes)
        code = run(words)
        # After a failure torchrun ends the processes that have not connected yet.
        server.settimeout(_LATE_S if code == 0 else 0)
        with suppress(OSError):
            for _ in range(node.num_processes - 1):
                _tell(server, code)
    return code


def _tell(server: socket.socket, code: int) -> None:
    """Send the exit code to the next process that waits for it."""
    connection, _ = server.accept()
    with connection:
        connection.sendall(bytes([code]))


def _follow(node: LaunchedNode) -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        while True:
            try:
                connection.connect(node.socket_name)
                break
            except ConnectionRefusedError:
                time.sleep(_RETRY_S)  # torchrun ends this process if the first one fails before
        with suppress(ConnectionError):
            received = connection.recv(1)
            return received[0] if received else _EXIT_FAILURE
    return _EXIT_FAILURE
