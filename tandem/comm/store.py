# SPDX-License-Identifier: Apache-2.0
"""The store for the rendezvous of processes: a TCP server in the driver, a client in each worker.

Every wait on it has a time limit. Tensors do not pass through it. torch's server knows no
passwords: it listens at one address only, loopback for a run of one machine, and the keys of a run
have a random prefix, so that processes of another run that reach the port meet nobody.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from tandem.errors import UserError

_PREFIX_BYTES = 16


@dataclass(frozen=True, slots=True)
class StorePlace:
    """The place of a store: its address, and the prefix of the keys of a run in it."""

    host: str
    port: int
    prefix: str

    def connect(self, *, timeout_s: float) -> Store:
        """Connect to the store; see ``connect_store``."""
        return PrefixStore(self.prefix, connect_store(self.host, self.port, timeout_s=timeout_s))


@dataclass(frozen=True, slots=True)
class HostedStore:
    """A store whose server runs in this process while this object lives."""

    place: StorePlace
    server: TCPStore


def host_store(address: str, *, timeout_s: float) -> HostedStore:
    """Start the server on a free port of ``address``, and of no other address of this host.

    Raises:
        UserError: this host does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise UserError(
            "store",
            address,
            rule=f"the driver cannot listen at this address of its node ({error.strerror})",
            remedy="Give Ray an address that this host has: ray_kwargs.ray_init._node_ip_address, "
            "or `ray start --node-ip-address`.",
        ) from error
    port = listening.getsockname()[1]
    server = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listening.detach(),
    )
    return HostedStore(StorePlace(address, port, secrets.token_hex(_PREFIX_BYTES)), server)


def share_port(host: str, port: int, *, key: str, is_first: bool, timeout_s: float) -> int:
    """Return a port of the first host that was free, the same on every host and in every call.

    Args:
        host, port: the address of a store that runs on the first host.
        key: a key of that store, the same on every host.
        is_first: whether this is the first host.

    Raises:
        UserError: the store does not answer, or the first host does not choose, in time.
    """
    store = connect_store(host, port, timeout_s=timeout_s)
    if is_first and not store.check([key]):
        with socket.create_server(("", 0)) as server:
            store.set(key, str(server.getsockname()[1]))
    try:
        return int(store.get(key))
    except DistError as error:
        raise UserError(
            "store",
            f"{host}:{port}",
            rule=f"the first node has not chosen a port within {timeout_s:g} s",
            remedy="Check that the first node runs.",
        ) from error


def connect_store(host: str, port: int, *, timeout_s: float) -> Store:
    """Connect to the driver's store. ``timeout_s`` limits this call and every later wait.

    Raises:
        UserError: the server does not answer in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise UserError(
            "store",
            f"{host}:{port}",
            rule=f"cannot be reached within {timeout_s:g} s",
            remedy="Check that the driver runs and that this host can connect to it.",
        ) from error
