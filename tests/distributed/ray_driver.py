# SPDX-License-Identifier: Apache-2.0
"""Drivers as they are in earnest: processes that start a runtime, and objects for its workers.

A driver reports by lines of JSON.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from tandem.errors import UserError
from tandem.platforms.isolation import CUDA_LIKE
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CPU
from tandem.runtime.cluster import ClusterSettings, plan_cluster
from tandem.runtime.failure import NodeFailure, WorkerFailure
from tandem.runtime.nodes import HeadServer, run_on_nodes
from tandem.runtime.ray import RayRuntime
from tandem.runtime.ray_node import start_head
from tandem.runtime.token import added

DEVICES = replace(CPU, visibility=CUDA_LIKE)
"""Workers compute on the CPU, but are given and isolated to devices."""


class UnpicklableError(Exception):
    """Carries what cannot cross to another process."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class Probe:
    """What workers hold in these tests."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.seen: list[int] = []
        self._busy = threading.Lock()

    def where(self) -> dict[str, Any]:
        """Of this process, as it finds itself."""
        names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        return {
            **asdict(self.place),
            "pid": os.getpid(),
            "environment": {name: os.environ.get(name) for name in names},
            "threads": torch.get_num_threads(),
            "folder": os.getcwd(),
        }

    def note(self, number: int) -> list[int]:
        """All numbers so far."""
        assert self._busy.acquire(blocking=False), "two calls at the same time"
        time.sleep(0.001)
        self.seen.append(number)
        self._busy.release()
        return list(self.seen)

    def sleep(self, seconds: float) -> float:
        """When it was over."""
        time.sleep(seconds)
        return time.time()

    def hold_the_interpreter(self) -> None:
        ctypes.PyDLL(None).sleep(600)

    def add(self, left: torch.Tensor, *, right: torch.Tensor) -> torch.Tensor:
        return left + right

    def fail(self, kind: str) -> None:
        if kind == "user":
            raise UserError("some.key=1: must be 2. Set some.key=2.")
        if kind == "unpicklable":
            raise UnpicklableError
        raise ValueError("a bad value")

    def warn(self) -> None:
        logging.getLogger("tandem.models").warning("something odd in %s", "layer 3")


def build_probe(place: WorkerPlace) -> Probe:
    return Probe(place)


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def ray_processes() -> list[int]:
    """Everything that this process has started."""
    return [process.pid for process in psutil.Process().children(recursive=True)]


def be_refused_an_address() -> int:
    """At which nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    one = plan_cluster(ClusterSettings(1, 1), {"RAY_ADDRESS": f"127.0.0.1:{port}"})
    started = time.monotonic()
    try:
        RayRuntime(one, platform=DEVICES, pools={"train": [0]})
    except UserError as error:
        say(seconds=time.monotonic() - started, error=str(error))
    return 0


def be_refused_devices() -> int:
    """One more than there is."""
    plan = plan_cluster(ClusterSettings(1, 2, ray_init={"num_gpus": 1}), {})
    try:
        RayRuntime(plan, platform=DEVICES, pools={"train": [0, 0]})
    except UserError as error:
        say(error=str(error))
    return 0


def be_refused_a_node() -> int:
    """Because it does not come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    alone = plan_cluster(ClusterSettings(2, 1, wait_s=1), variables)

    def body(head: HeadServer | None) -> int:
        with RayRuntime(alone, platform=CPU, pools={"train": [0, 1]}, head=head):
            return 0

    token_file = Path(tempfile.mkdtemp()) / "token"
    try:
        run_on_nodes(alone, body, platforms=[CPU], token_file=token_file)
    except UserError as error:
        say(error=str(error))
    return 0


def wait_for_a_node() -> int:
    """In a coroutine, while an event loop has the signals; the other node never comes."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29714", "NODE_RANK": "0"}
    plan = plan_cluster(ClusterSettings(2, 1, wait_s=300), variables)

    def report() -> None:
        while not getattr(sys.modules.get("ray"), "is_initialized", bool)():
            time.sleep(0.1)
        time.sleep(1)  # until ray.init has returned
        say(pids=ray_processes())

    async def start() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, say)
        threading.Thread(target=report, daemon=True).start()
        RayRuntime(plan, platform=CPU, pools={"train": [0, 1]})

    asyncio.run(start())
    return 0


def start_a_head() -> int:
    """Report the commands of all processes of a cluster, and whether they ask for its token."""
    ray_init = json.loads(os.environ["TANDEM_TEST_RAY_INIT"])
    plan = plan_cluster(ClusterSettings(1, 1, ray_init=ray_init), {})
    with RayRuntime(plan, platform=CPU, pools={"train": [0]}):
        children = psutil.Process().children(recursive=True)
        commands = [" ".join(process.cmdline()) for process in children]
        servers = [process for process in children if process.name() in ("gcs_server", "raylet")]
        modes = [process.environ().get("RAY_AUTH_MODE") for process in servers]
        say(commands=commands, modes=modes)
    return 0


def use_clusters_in_turn() -> int:
    """Report the modes of the clusters that this process forms, between those that others have."""
    import ray

    modes: list[str | None] = []
    for kind in os.environ["TANDEM_TEST_CLUSTERS"].split():
        node, address = None, ""
        if kind == "existing":
            # Ray replaces a loopback address in RAY_ADDRESS by this one.
            options = {"node_ip_address": ray.util.get_node_ip_address(), "num_cpus": 1}
            with added({"RAY_AUTH_MODE": "disabled"}, os.environ):
                node, address = start_head(options, role="local", token="")
        environment = {"RAY_ADDRESS": address} if address else {}
        plan = plan_cluster(ClusterSettings(1, 1), environment)
        with RayRuntime(plan, platform=CPU, pools={"train": [0]}) as runtime:
            group = runtime.start_pools({"train": build_probe})["train"]
            assert group.gather([group.submit(0, "note", 1)]) == [[1]]
            servers = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
            modes += [server.environ().get("RAY_AUTH_MODE") for server in servers]
        if node is not None:
            node.close()
    left = [name for name in os.environ if name.startswith("RAY_AUTH")]
    say(modes=modes, left=left)
    return 0


def lose_a_process() -> int:
    """Kill one of Ray's own processes while a worker computes."""
    name = os.environ["TANDEM_TEST_KILLED"]
    plan = plan_cluster(ClusterSettings(1, 1), {})
    with RayRuntime(plan, platform=CPU, pools={"train": [0]}) as runtime:
        group = runtime.start_pools({"train": build_probe})["train"]
        call = group.submit(0, "sleep", 600)
        children = psutil.Process().children(recursive=True)
        (killed,) = [process for process in children if process.name() == name]
        killed.kill()
        group.gather([call])
    return 0


def terminate_a_worker() -> int:
    """Send SIGTERM to a worker in which no thread of Python can run."""
    plan = plan_cluster(ClusterSettings(1, 1), {})
    with RayRuntime(plan, platform=CPU, pools={"train": [0]}) as runtime:
        group = runtime.start_pools({"train": build_probe})["train"]
        (pid,) = (told["pid"] for told in group.gather([group.submit(0, "where")]))
        call = group.submit(0, "hold_the_interpreter")
        time.sleep(1.0)  # it has begun, or begins and ends with the process all the same
        os.kill(pid, signal.SIGTERM)
        group.gather([call])
    return 0


def main(arguments: list[str]) -> int:
    """Be the driver that the argument names, in an environment that nothing of Ray's is in."""
    (function,) = arguments
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        del os.environ[name]
    functions = (
        terminate_a_worker,
        be_refused_an_address,
        be_refused_devices,
        be_refused_a_node,
        wait_for_a_node,
        start_a_head,
        lose_a_process,
        use_clusters_in_turn,
    )
    drivers = {f.__name__: f for f in functions}
    try:
        return drivers[function]()
    except (WorkerFailure, NodeFailure) as error:
        say(error=str(error))
        return 1
