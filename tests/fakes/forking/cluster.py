# SPDX-License-Identifier: Apache-2.0
"""A cluster of Ray that runs use one after the other, with workers that are forked.

A cluster consists of six processes, whose start takes three seconds of processor time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem.runtime.ray_node import start_head
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
        options = {"node_ip_address": "127.0.0.1", "num_cpus": NUM_CPUS}
        node, address = start_head(options, role="local", token="")
    try:
        yield Conditions(environment=_RAY | {"RAY_ADDRESS": address})
    finally:
        node.close()
