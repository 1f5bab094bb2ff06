# SPDX-License-Identifier: Apache-2.0
"""The store at which processes find each other: one TCP server in the driver, a client in each
worker. Every wait on it has a deadline. No tensors pass through it.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from tandem.errors import UserError


def host_store(*, timeout_s: float) -> TCPStore:
    """Start the server on a free port of this host, and keep it: it lives as long as the value.

    The port is ``store.port``; workers also need a name of this host that they can reach.
    """
    return TCPStore(
        "0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def connect_store(host: str, port: int, *, timeout_s: float) -> Store:
    """A client of the driver's store. ``timeout_s`` bounds this call and every later wait.

    Raises:
        UserError: there is none within the time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    except DistError as error:
        raise UserError(
            f"store={host}:{port}: cannot be reached within {timeout_s:g} s. "
            "Check that the driver runs and that this host can connect to it."
        ) from error
