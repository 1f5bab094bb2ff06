# SPDX-License-Identifier: Apache-2.0
"""Where the nodes of a run meet before there is a Ray cluster, and learn how the run ended.

The head listens at MASTER_ADDR; each member keeps one connection for the whole run, whose end
tells either side that the other is gone. Lines of JSON: the member sends ``{"rank": r}``, the head
``{"ray": address}`` once its Ray runs and ``{"exit": code}`` at the end.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tandem.errors import UserError
from tandem.runtime.cluster import ClusterPlan
from tandem.runtime.failure import NodeFailure

_RETRY_S = 0.3
_HELLO_S = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A peer that the network has lost is noticed after 10 s of silence."""


class Meeting:
    """The head's side. Threads wait on its condition only, and end with ``close``."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Listen.

        Raises:
            UserError: the port is taken.
        """
        _, port = plan.host_and_port
        self._num_nodes = plan.settings.num_nodes
        self._present: set[int] = set()
        self._ray_address = ""
        self._exit_code: int | None = None
        self._changed = threading.Condition()
        try:
            self._server = socket.create_server(("", port))
        except OSError as error:
            raise UserError(
                f"MASTER_PORT={port}: this node, the first, cannot listen there "
                f"({error.strerror}). Set another one on every node."
            ) from error
        self._closing, self._closed = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept, name="nodes", daemon=True)]
        self._threads[0].start()

    def announce(self, ray_address: str) -> None:
        """Let the members, those here and those to come, join the Ray cluster at this address."""
        with self._changed:
            self._ray_address = ray_address
            self._changed.notify_all()

    def absent(self) -> list[int]:
        """Ranks of the members that have not come yet."""
        with self._changed:
            return sorted(set(range(1, self._num_nodes)) - self._present)

    def close(self, exit_code: int) -> None:
        """Tell the members how the run ended."""
        with self._changed:
            self._exit_code = exit_code
            self._changed.notify_all()
        self._closing.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        """Until the end of the run; whoever has connected by then is served."""
        with self._server, self._closed:
            while True:
                ready, _, _ = select.select([self._server, self._closed], [], [])
                if self._server not in ready:
                    return
                connection, _ = self._server.accept()
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="node", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, KeyError, TypeError):
            connection.settimeout(_HELLO_S)
            rank = int(_receive(connection)["rank"])
            _watch_peer(connection)
            with self._changed:
                self._present.add(rank)
            self._tell(connection, self._ray_message)
            self._tell(connection, self._exit_message)

    def _ray_message(self) -> dict[str, Any] | None:
        return {"ray": self._ray_address} if self._ray_address else None

    def _exit_message(self) -> dict[str, Any] | None:
        return None if self._exit_code is None else {"exit": self._exit_code}

    def _tell(
        self, connection: socket.socket, message: Callable[[], dict[str, Any] | None]
    ) -> None:
        """Send ``message()`` as soon as there is one; at the end of the run, only its end."""
        with self._changed:
            self._changed.wait_for(lambda: message() or self._exit_code is not None)
            sent = message()
        if sent is not None:
            _send(connection, sent)


class Attendance:
    """A member's side: one connection to the head."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Connect, for as long as the plan lets nodes wait for each other.

        Raises:
            UserError: the head does not show up.
        """
        self.plan = plan
        self.connection = self._connect(time.monotonic() + plan.settings.wait_s)
        self.own_address: str = self.connection.getsockname()[0]
        _watch_peer(self.connection)
        _send(self.connection, {"rank": plan.node_rank})

    def receive(self) -> dict[str, Any]:
        """The head's next message.

        Raises:
            NodeFailure: there will be none.
        """
        try:
            return _receive(self.connection)
        except (OSError, ValueError) as error:
            raise NodeFailure(
                f"the first node ({self.plan.address}) vanished, and the run with it: "
                "it was ended, or the network to it is down"
            ) from error

    def close(self) -> None:
        """Leave."""
        self.connection.close()

    def _connect(self, deadline: float) -> socket.socket:
        plan = self.plan
        while True:
            try:
                return socket.create_connection(plan.host_and_port, timeout=5)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"MASTER_ADDR={plan.host_and_port[0]}: no run answers at {plan.address} "
                        f"after {plan.settings.wait_s:g} s ({error.strerror or error}). Start the "
                        "same command with NODE_RANK=0 there, or raise "
                        "trainer.ray_wait_register_center_timeout."
                    ) from error
                time.sleep(_RETRY_S)


def _watch_peer(connection: socket.socket) -> None:
    """Let a connection fail within seconds of its peer being out of reach."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # not every system has all
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """One line and no more, so that whoever waits for the connection to be readable misses nothing.

    Raises:
        ValueError: it ended before.
    """
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte:
            raise ValueError("the connection has ended")
        line += byte
    return json.loads(line)
