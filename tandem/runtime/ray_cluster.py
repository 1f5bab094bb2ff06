# SPDX-License-Identifier: Apache-2.0
"""Getting hold of a Ray cluster, and reserving devices on it where the plan wants them.

The module ray comes in as an argument, because one file only imports it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partialmethod
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError
from tandem.runtime.cluster import (
    ClusterPlan,
    ClusterSettings,
    OwnDevices,
    node_resources,
    require_fit,
)
from tandem.runtime.rendezvous import Meeting
from tandem.runtime.resources import (
    NodeState,
    Resources,
    demands,
    is_held,
    is_marked,
    num_equipped,
    refuse,
)

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

_PROBE_S = 8.0
_POLL_S = 0.2
_RESERVE_S = 30.0
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""A node that the network has lost is given up after 12 s instead of about a minute."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The devices of one planned node: bundle ``index`` of a placement group, on a node with these
    resources."""

    group: Any
    index: int
    address: str
    resources: Resources


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM end what blocks the main thread, by KeyboardInterrupt and SystemExit.

    An event loop only takes note of a signal, and a coroutine that blocks keeps it from looking.
    """
    wakeup = signal.set_wakeup_fd(-1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)


def start_ray(
    ray: ModuleType, plan: ClusterPlan, *, devices: Callable[[], Sequence[OwnDevices]]
) -> None:
    """Connect to the plan's cluster; ``local`` and ``head`` start it.

    Args:
        devices: finds those of this node.

    Raises:
        UserError: there is none, or Ray does not accept ``ray_kwargs.ray_init``.
    """
    given = {name: value for name, value in plan.settings.ray_init.items() if name != "address"}
    if plan.role == "existing":
        _probe(plan)
        wanted: dict[str, Any] = {"address": plan.address}
    else:
        cores = os.cpu_count() or 1
        wanted = node_resources(devices(), num_cores=cores, settings=plan.settings)
        wanted |= {"address": "local", "include_dashboard": False}
    if plan.role == "head":
        wanted |= {"_system_config": _HEALTH_CHECKS, **_named_address(plan)}
    quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    arguments = quiet | wanted | given
    few = _few_processes(ray, arguments) if plan.role == "local" else nullcontext()
    try:
        with _kept_sigterm_handler(), _own_sessions(), few:
            ray.init(**arguments)
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        if given and not isinstance(error, ConnectionError):
            raise UserError(
                f"ray_kwargs.ray_init={given}: {_first_line(error)} Leave it out."
            ) from error
        if plan.role != "existing":
            raise
        raise UserError(
            f"{plan.source}={plan.address}: {_first_line(error)} This machine must be one of the "
            "cluster's nodes: type `ray start --address=...` on it."
        ) from error


def reserve(
    ray: ModuleType,
    plan: ClusterPlan,
    *,
    pools: Mapping[str, Sequence[int]],
    platforms: Mapping[str, Platform],
    meeting: Meeting | None,
) -> dict[int, Reservation]:
    """Reserve the devices of each planned node on a node of the cluster of its own.

    Args:
        pools: per pool the number of the planned node of each rank.
        platforms: of each pool.
        meeting: where the nodes of a run that forms its cluster are to come.

    Raises:
        UserError: the nodes do not come in time, or do not have so many devices, or others use
            them.
    """
    needs = _wait_for_nodes(ray, plan, pools=pools, platforms=platforms, meeting=meeting)
    numbers = sorted(needs)
    group = ray.util.placement_group([needs[n] for n in numbers], strategy="STRICT_SPREAD")
    if not group.wait(_RESERVE_S):
        raise _refusal(ray, plan, needs=needs, platforms=platforms, is_large_enough=True)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    reserved: dict[int, Reservation] = {}
    for index, number in enumerate(numbers):
        node = nodes[placed[index]]
        reserved[number] = Reservation(group, index, node["NodeManagerAddress"], node["Resources"])
    return reserved


def _wait_for_nodes(
    ray: ModuleType,
    plan: ClusterPlan,
    *,
    pools: Mapping[str, Sequence[int]],
    platforms: Mapping[str, Platform],
    meeting: Meeting | None,
) -> dict[int, dict[str, float]]:
    """Until the cluster can hold the run: at once, unless nodes are still to come. Returns what
    each planned node takes."""
    settings = plan.settings
    deadline = time.monotonic() + (settings.wait_s if settings.num_nodes > 1 else 0)
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [NodeState(n["NodeManagerAddress"], n["Resources"], {}) for n in alive]
        needs = demands(pools, platforms, marked=is_marked(nodes, platforms))
        if is_held(list(needs.values()), [node.total for node in nodes]):
            return needs
        late = time.monotonic() >= deadline
        if late and len(alive) < settings.num_nodes:
            absent = [] if meeting is None else meeting.absent()
            raise UserError(_missing_nodes(settings, len(alive), absent=absent))
        # A cluster that the run has formed is complete; of another, more nodes may be on their way.
        present = (
            len(alive)
            if plan.role == "head"
            else num_equipped([node.total for node in nodes], list(needs.values()))
        )
        if late or present >= settings.num_nodes:
            raise _refusal(ray, plan, needs=needs, platforms=platforms, is_large_enough=False)
        time.sleep(_POLL_S)


def _refusal(
    ray: ModuleType,
    plan: ClusterPlan,
    *,
    needs: Mapping[int, Resources],
    platforms: Mapping[str, Platform],
    is_large_enough: bool,
) -> UserError:
    """Why the cluster does not hold the run: others use it, or no nodes of this kind could."""
    nodes = _states(ray)
    if is_marked(nodes, platforms):
        return refuse(needs, nodes, platforms=platforms)
    resource = next(iter(platforms.values())).visibility.resource
    if is_large_enough:
        free = ray.available_resources().get(resource, 0)
        return UserError(
            f"trainer.n_gpus_per_node={plan.settings.devices_per_node}, trainer.nnodes="
            f"{plan.settings.num_nodes}: so many {resource}s exist, but others use them; {free:g} "
            "are free. Wait until the others have ended, or lower these."
        )
    for what in (resource, "CPU"):
        require_fit(
            {number: int(need[what]) for number, need in needs.items()},
            [int(node.total.get(what, 0)) for node in nodes],
            settings=plan.settings,
            what=what,
        )
    return refuse(needs, nodes, platforms=platforms)


def _states(ray: ModuleType) -> list[NodeState]:
    free = ray._private.state.available_resources_per_node()
    return [
        NodeState(node["NodeManagerAddress"], node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _missing_nodes(settings: ClusterSettings, num_present: int, *, absent: Sequence[int]) -> str:
    ranks = f" (NODE_RANK {', '.join(map(str, absent))})" if absent else ""
    return (
        f"trainer.nnodes={settings.num_nodes}: only {num_present} of them are there after "
        f"{settings.wait_s:g} s. Start the others{ranks}, or raise "
        "trainer.ray_wait_register_center_timeout."
    )


def _probe(plan: ClusterPlan) -> None:
    """Ask for the cluster in a process that can be stopped: ray.init may wait for minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    command += [] if plan.address == "auto" else [f"--address={plan.address}"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_PROBE_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"{plan.source}={plan.address}: no Ray cluster answers there. Correct or unset it, or "
            "start one with `ray start --head`."
        ) from error


def _named_address(plan: ClusterPlan) -> dict[str, str]:
    """The address by which members know this node, if it is one of its own; it may be that of a
    proxy, and then Ray finds one by itself."""
    host, _ = plan.host_and_port
    try:
        address = socket.gethostbyname(host)
        socket.create_server((address, 0)).close()
    except OSError:
        return {}
    return {"_node_ip_address": address}


@contextmanager
def _kept_sigterm_handler() -> Iterator[None]:
    """Keep ray.init from replacing what this process does on SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def _own_sessions() -> Iterator[None]:
    """Start processes in sessions of their own.

    A signal to the process group of the driver, as `timeout` and terminals send it, must not reach
    Ray's processes: the driver needs them to save. Ray has no option for it.
    """
    start: Any = subprocess.Popen.__init__
    own_session: Any = partialmethod(start, start_new_session=True)
    subprocess.Popen.__init__ = own_session
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start


@contextmanager
def _few_processes(ray: ModuleType, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Start none that the arguments switch off, and no autoscaler: for a cluster of one node that
    ends with the run.

    Each takes a second of a core, and the driver waits for one of them. Ray starts them all the
    same, and has no option for it.
    """
    wanted = {
        "start_monitor": False,
        "start_api_server": arguments.get("include_dashboard", True),
        "start_log_monitor": arguments["log_to_driver"],
    }
    node = ray._private.node.Node
    unwanted = [name for name, is_wanted in wanted.items() if not is_wanted]
    starts = {name: getattr(node, name) for name in unwanted if hasattr(node, name)}
    for name in starts:
        setattr(node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(node, name, start)


def _start_nothing(_node: object, **_options: object) -> None:
    """In place of a method of Ray's node."""


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _first_line(error: Exception) -> str:
    """With a full stop."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    return line.rstrip(".") + "."
