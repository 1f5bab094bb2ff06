# SPDX-License-Identifier: Apache-2.0
"""The store for the rendezvous of processes: a TCP server in the driver, a client in each worker.

Every wait on it has a time limit. Tensors do not pass through it.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from tandem.errors import UserError


def host_store(*, timeout_s: float) -> TCPStore:
    """Start the server on a free port, ``store.port``. It runs while the returned object lives."""
    return TCPStore(
        "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


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
