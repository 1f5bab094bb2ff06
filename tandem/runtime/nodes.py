# SPDX-License-Identifier: Apache-2.0
"""A run on several nodes, all started with the same command.

The first node, the head, drives the run. The others, its members, add their devices to the head's
Ray cluster, wait for the end of the run, and exit with its exit code. The Ray processes of a node
end with the command on that node, however it ends.

The head listens at MASTER_ADDR. Each member keeps one connection for the whole run. If it closes,
the other side is gone. Messages are lines of JSON. Both sides prove that they know the token of the
cluster (``token``). The head sends ``{"ray": address}`` once its Ray runs; at the end ``{"exit":
code}``, with ``"again": true`` if it starts the run again. ADR 0005 has the reasons.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from tandem.errors import UserError
from tandem.platforms.record import Platform
from tandem.runtime.cluster import ClusterPlan, node_resources
from tandem.runtime.failure import NodeFailure
from tandem.runtime.probe_devices import find_devices
from tandem.runtime.ray_node import RayNode, address_here
from tandem.runtime.token import (
    FILE_WAIT_S,
    is_of_user,
    is_proof,
    member_token,
    new_nonce,
    own_token,
    prove,
    remove_token,
    write_token,
)

logger = logging.getLogger(__name__)

_RETRY_S = 0.3
_HELLO_S = 5.0
_SHUTDOWN_S = 5.0
_NOTICE_S = 60.0
_LOOK_S = 0.5
_NAME_S = 1.0
"""How long ``ray start`` may take to name the process that was lost."""
_ENDED = "ray ended"
"""The field of a member's only message after its greeting."""
_MIN_WAIT_S = 0.001
_MAX_MESSAGE_BYTES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A peer that the network has lost is noticed after 10 s of silence."""


def run_on_nodes(
    plan: ClusterPlan,
    body: Callable[[HeadServer | None], int],
    *,
    platforms: Collection[Platform],
    token_file: Path,
    will_restart: Callable[[], bool] = lambda: False,
) -> int:
    """Run ``body`` on the node that drives; return its exit code, on every node.

    Args:
        body: its argument is the server for the members, None if the run has no members.
        platforms: the platforms of the run's pools.
        token_file: the file by which the first node gives the others the token of the cluster.
        will_restart: whether a failure at this moment will be followed by another start.

    Raises:
        UserError: the nodes do not find each other, or lack the token.
        NodeFailure: on a member: the head vanished or starts the run again, or this node's Ray
            ended.
    """
    if plan.role == "member":
        return _join(plan, platforms, token_file=token_file)
    if plan.role != "head":
        return body(None)
    token = own_token(os.environ)
    write_token(token_file, token)
    try:
        return _lead(HeadServer(plan, token), body, will_restart=will_restart)
    finally:
        remove_token(token_file, token)


def _lead(
    server: HeadServer,
    body: Callable[[HeadServer | None], int],
    *,
    will_restart: Callable[[], bool],
) -> int:
    """Run ``body`` and tell the members how it ends."""
    exit_code, again = 1, False
    try:
        exit_code = body(server)
    except UserError:
        exit_code = 2
        raise
    except Exception:
        again = will_restart()
        raise
    finally:
        server.close(exit_code, again=again)
    return exit_code


def _join(plan: ClusterPlan, platforms: Collection[Platform], *, token_file: Path) -> int:
    """Add this member's devices to the cluster until the run ends; return its exit code."""
    client, token = meet_head(plan, token_file)
    with closing(client):
        message = client.receive()
        if "exit" in message:
            return _exit_code(message)
        resources = node_resources(
            find_devices(platforms), num_cores=os.cpu_count() or 1, settings=plan.settings
        )
        options = {"address": message["ray"], "node_ip_address": client.own_address, **resources}
        start = partial(RayNode, options, role="member", token=token)
        with closing(start()) as node:
            end = _wait_for_end(client, node)
            if isinstance(end, int) or node.has_started:
                return _exit_code_after(end, client, node=node)
        # Ray's raylet ends itself if its helpers, which import much, take longer than 15 s.
        logger.warning("Ray did not start on this node (%s); it is started once more", end)
        with closing(start()) as node:
            return _exit_code_after(_wait_for_end(client, node), client, node=node)


def meet_head(plan: ClusterPlan, token_file: Path) -> tuple[MemberClient, str]:
    """Return the connection of a member to the head, and the token that both know.

    A network file system may still show the token of an earlier head that was killed. The file is
    therefore read again for some seconds if the head has another token.

    Raises:
        NodeFailure: the connection is lost.
        UserError: the head does not answer, the two have different tokens, or this node has none.
    """
    deadline: float | None = None
    while True:
        client = MemberClient(plan)
        deadline = deadline or time.monotonic() + FILE_WAIT_S  # from the first answer on
        try:
            return client, client.greet(lambda: member_token(os.environ, token_file))
        except OtherTokenError:
            client.close()
            if is_of_user(os.environ) or time.monotonic() >= deadline:
                raise
        except BaseException:
            client.close()
            raise
        time.sleep(_RETRY_S)


def _wait_for_end(client: MemberClient, node: RayNode) -> int | str:
    """Wait until the run ends; return its exit code, or how Ray ended if that was before."""
    end = ""
    while not end:
        ready, _, _ = select.select([client.connection], [], [], _LOOK_S)
        if ready:
            return _exit_code(client.receive())
        node.watch_processes()
        end = node.describe_end(notice_s=_NAME_S)
    return end


def _exit_code_after(end: int | str, client: MemberClient, *, node: RayNode) -> int:
    """Return the exit code of the run. If Ray ended before, tell the head how.

    Raises:
        NodeFailure: the run has not ended, or is started again.
    """
    if isinstance(end, int):
        return end
    client.tell_end(end)
    # At the end of a run, Ray's head ends just before the exit code is sent. A head that restarts
    # sends its message when it has noticed that this node's Ray is gone.
    wait_s = _NOTICE_S if client.plan.settings.restarts else _SHUTDOWN_S
    ready, _, _ = select.select([client.connection], [], [], wait_s)
    if ready:
        return _exit_code(client.receive())
    raise NodeFailure("\n".join(["this node's Ray ended before the run did", *node.last_lines()]))


def _exit_code(message: Mapping[str, Any]) -> int:
    """Return the exit code of a message. Raise NodeFailure if the head starts the run again."""
    if message.get("again"):
        raise NodeFailure("the first node starts the run again", restarts_elsewhere=True)
    return message["exit"]


class HeadServer:
    """The head's side of the connections. Its threads end with ``close``.

    Attributes:
        token: the secret of the cluster.
    """

    def __init__(self, plan: ClusterPlan, token: str) -> None:
        """Listen at MASTER_ADDR; at every address if this node only has it through a proxy.

        Raises:
            UserError: the port is taken.
        """
        host, port = plan.host_and_port
        self.token = token
        self._num_nodes = plan.settings.num_nodes
        self._present: set[int] = set()
        self._lost = ""
        self._ray_address = ""
        self._end: dict[str, Any] | None = None
        self._changed = threading.Condition()
        try:
            self._server = socket.create_server((_address_for_members(host), port))
        except OSError as error:
            raise UserError(
                "MASTER_PORT",
                port,
                rule=f"the first node cannot listen on it ({error.strerror})",
                remedy="Set another port on every node.",
            ) from error
        self._closing, self._closed = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept, name="nodes", daemon=True)]
        self._threads[0].start()

    def announce(self, ray_address: str) -> None:
        """Let all members, present and future, join the Ray cluster at this address."""
        with self._changed:
            self._ray_address = ray_address
            self._changed.notify_all()

    def absent(self) -> list[int]:
        """Return the ranks of the members that have not connected yet.

        Raises:
            NodeFailure: a member has gone.
        """
        if lost := self.lost():
            raise NodeFailure(lost)
        with self._changed:
            return sorted(set(range(1, self._num_nodes)) - self._present)

    def lost(self) -> str:
        """Return which member was the first to go before the end of the run; "" if none has."""
        with self._changed:
            return self._lost

    def close(self, exit_code: int, *, again: bool = False) -> None:
        """Send the exit code to the members, and end the threads.

        Args:
            again: whether the run starts again, so that the members must come back.
        """
        with self._changed:
            self._end = {"exit": exit_code} | ({"again": True} if again else {})
            self._changed.notify_all()
        self._closing.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
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
            rank = self._admit(connection)
            if rank is None:
                return
            _watch_peer(connection)
            with self._changed:
                if rank in self._present:
                    _send(connection, {"refused": "another node of this run has this rank"})
                    return
                self._present.add(rank)
            watching = threading.Thread(
                target=self._watch_member, args=(connection, rank), name="node", daemon=True
            )
            watching.start()
            try:
                self._inform(connection)
            finally:
                connection.shutdown(socket.SHUT_RDWR)  # which ends the watch
                watching.join()

    def _inform(self, connection: socket.socket) -> None:
        """Send a member what it waits for, up to the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._ray_address or self._end is not None)
            ray_address = self._ray_address
        if ray_address:
            _send(connection, {"ray": ray_address})
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None)
        _send(connection, self._end or {})

    def _watch_member(self, connection: socket.socket, rank: int) -> None:
        """Wait until a member is gone, or says that its Ray is."""
        address = "its address is unknown"
        why = "its command has ended (its output says why), or the network to it is down"
        with suppress(OSError, ValueError, KeyError):
            address = connection.getpeername()[0]
            said = " ".join(str(_receive(connection)[_ENDED]).split())
            why = f"Ray ended there ({said})"
        with self._changed:
            if self._end is None and not self._lost:
                self._lost = f"node {rank} ({address}) was lost: {why}"

    def _admit(self, connection: socket.socket) -> int | None:
        """Return the rank of a peer that knows the token; refuse any other."""
        nonce = new_nonce()
        _send(connection, {"nonce": nonce})
        hello = _receive(connection, within_s=_HELLO_S)
        rank, given = int(hello["rank"]), str(hello["nonce"])
        if not is_proof(hello["proof"], self.token, statement=("member", nonce, given, rank)):
            _send(connection, {"proof": ""})
            return None
        _send(connection, {"proof": prove(self.token, ("head", nonce, given))})
        return rank


class OtherTokenError(UserError):
    """The head has another token than this node."""


class MemberClient:
    """A member's side: one connection to the head."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Connect, waiting for the head as long as the plan allows.

        Raises:
            UserError: the head does not answer in time.
        """
        self.plan = plan
        self.connection = self._connect(time.monotonic() + plan.settings.wait_s)
        self.own_address: str = self.connection.getsockname()[0]
        _watch_peer(self.connection)

    def greet(self, find_token: Callable[[], str]) -> str:
        """Show that this node knows the token, and check that the head does; return the token.

        Args:
            find_token: returns the token. It is called once the head listens.

        Raises:
            NodeFailure: the connection is lost.
            OtherTokenError: the two have different tokens.
            UserError: this node has none, or what listens there is no run.
        """
        nonce, own = str(self._hear().get("nonce", "")), new_nonce()
        token, rank = find_token(), self.plan.node_rank
        proof = prove(token, ("member", nonce, own, rank))
        _send(self.connection, {"rank": rank, "nonce": own, "proof": proof})
        if not is_proof(self._hear().get("proof"), token, statement=("head", nonce, own)):
            raise OtherTokenError(
                "MASTER_ADDR",
                self.plan.address,
                rule="the run there has another token than this node",
                remedy="Give every node the same run folder, on a file system that all nodes see, "
                "and unset RAY_AUTH_TOKEN or set the same one on every node.",
            )
        self.connection.settimeout(None)
        return token

    def _hear(self) -> dict[str, Any]:
        """Return the next message of a greeting, which a head sends at once; see ``receive``."""
        wait_s = self.plan.settings.wait_s
        try:
            return self.receive(within_s=wait_s)
        except NodeFailure as failure:
            cause = failure.__cause__
            is_silent = isinstance(cause, TimeoutError) and cause.errno is None
            if not is_silent and not isinstance(cause, ValueError):
                raise
            raise UserError(
                "MASTER_ADDR",
                self.plan.host_and_port[0],
                rule=f"no run of tandem answers at {self.plan.address}, where something else "
                f"listens or nothing is said for {wait_s:g} s",
                remedy="Set MASTER_ADDR and MASTER_PORT of the first node, or another port on "
                "every node.",
            ) from failure

    def receive(self, *, within_s: float | None = None) -> dict[str, Any]:
        """Return the head's next message.

        Args:
            within_s: the time limit; None for none.

        Raises:
            NodeFailure: the connection is lost.
            UserError: the head refuses this member.
        """
        try:
            message = _receive(self.connection, within_s=within_s)
        except (OSError, ValueError) as error:
            raise NodeFailure(
                f"the first node ({self.plan.address}) vanished, and the run with it: "
                "it was ended, or the network to it is down",
                restarts_elsewhere=self.plan.settings.restarts,
            ) from error
        if "refused" in message:
            raise UserError(
                "NODE_RANK",
                self.plan.node_rank,
                rule=message["refused"],
                remedy="Give each node a rank of its own, from 0 to the number of nodes - 1.",
            )
        return message

    def tell_end(self, end: str) -> None:
        """Tell the head how Ray ended here, before workers that lose their peers are blamed."""
        with suppress(OSError):  # the head is gone
            _send(self.connection, {_ENDED: end[: _MAX_MESSAGE_BYTES // 8]})

    def close(self) -> None:
        """Disconnect."""
        self.connection.close()

    def _connect(self, deadline: float) -> socket.socket:
        plan = self.plan
        while True:
            try:
                return socket.create_connection(plan.host_and_port, timeout=5)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise UserError(
                        "MASTER_ADDR",
                        plan.host_and_port[0],
                        rule=f"no run answers at {plan.address} after {plan.settings.wait_s:g} s "
                        f"({error.strerror or error})",
                        remedy="Start the same command with NODE_RANK=0 there, or raise "
                        "trainer.ray_wait_register_center_timeout.",
                    ) from error
                time.sleep(_RETRY_S)


def _address_for_members(host: str) -> str:
    """Return the address to listen at: that of ``host``, or all."""
    address = address_here(host)
    # Many systems name the node itself by a loopback address, which no other node reaches.
    is_reached = address == host or not address.startswith("127.")
    return address if is_reached else ""


def _watch_peer(connection: socket.socket) -> None:
    """Make the connection fail within seconds after its peer becomes unreachable."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # not every system has all of them
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, *, within_s: float | None = None) -> dict[str, Any]:
    """Return one message. Read no byte beyond it, because ``select`` would miss that byte.

    Args:
        within_s: the time limit for the whole message; None for none.

    Raises:
        ConnectionError: the connection has ended.
        ValueError: the message is none of a run's.
        TimeoutError: the message did not arrive in time.
    """
    line = bytearray()
    deadline = None if within_s is None else time.monotonic() + within_s
    while not line.endswith(b"\n"):
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), _MIN_WAIT_S))
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError("the connection has ended")
        line += byte
        if len(line) > _MAX_MESSAGE_BYTES:
            raise ValueError("a message is too long")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is a mapping")
    return cast(dict[str, Any], message)
