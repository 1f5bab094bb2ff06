# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray that runs use one after the other, with workers that are forked.

A cluster consists of six processes, whose start takes three seconds of processor time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from tandem.runtime.ray_node import RayNode, RayNodeError, start_head
from tests.fakes.commands import Conditions
from tests.fakes.forking.server import start_forking

NUM_CPUS = 8
"""One for each worker of the largest run."""
_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # use the loopback interface
}


@contextmanager
def shared_cluster() -> Iterator[Conditions]:
    """Start a cluster, and yield the conditions of commands that use it."""
    forking = start_forking()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forking.executable)
        for name, value in (_RAY | forking.environment).items():
            patch.setenv(name, value)
        node, address = _start()
    try:
        yield Conditions(environment=_RAY | {"RAY_ADDRESS": address})
    finally:
        node.close()


def _start() -> tuple[RayNode, str]:
    """Start the head; once more if it ends while it starts, as Ray does on a busy machine."""
    options = {"node_ip_address": "127.0.0.1", "num_cpus": NUM_CPUS}
    with suppress(RayNodeError):
        return start_head(options, role="local", token="")
    return start_head(options, role="local", token="")
