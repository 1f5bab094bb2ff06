# SPDX-License-Identifier: Apache-2.0
"""Connects to the Ray cluster of a run, reserves its devices, and assigns them to workers.

The module ray is an argument, because only one file imports it. This file must not import torch,
because workers load it before they are isolated.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from tandem.errors import RunFailure, UserError
from tandem.platforms.place import WorkerPlace
from tandem.runtime.cluster import ClusterPlan, ClusterSettings, NodeDevices, node_resources
from tandem.runtime.os_settings import dying_at_once
from tandem.runtime.ray_node import RayNode, RayNodeError, address_here, start_head
from tandem.runtime.resources import (
    NodeState,
    Resources,
    fits,
    is_marked,
    node_needs,
    num_equipped,
    refusal,
)
from tandem.runtime.worker_process import WorkerAssignment, WorkerInfo

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

logger = logging.getLogger(__name__)

FLAGCX_VARIABLE = "USE_FLAGCX"
"""verl-FL's variable. The driver's value holds for all workers, because groups must agree on it."""

_CONNECT_S = 8.0
_PROBE_S = 120.0
"""The limit of a program that imports Ray, on a busy machine or from a network file system."""
_POLL_S = 0.2
_RESERVE_S = 30.0
_MAX_HOST_THREADS = 16
_MIG_PREFIX = "MIG-"
"""The prefix of the names of NVIDIA's MIG instances."""
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 5000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
}
"""An unreachable node is given up after 12 s instead of about a minute."""
_NODE_OPTIONS = {
    name: name.removeprefix("_")
    for name in (
        *("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "_memory"),
        *("include_dashboard", "dashboard_host", "dashboard_port", "proxy_server_url"),
        *("_system_config", "_temp_dir", "_plasma_directory", "_object_spilling_directory"),
        *("_node_ip_address", "_node_name", "_metrics_export_port"),
        *("enable_resource_isolation", "cgroup_path"),
        *("system_reserved_cpu", "system_reserved_memory"),
    )
}
"""Arguments of ray.init for the node that it starts, and their names as options of ``ray start``.
When ray.init connects to a running cluster, it rejects them.
"""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SystemExit on SIGTERM, even in a blocking call.

    An event loop only records a signal, and does not handle it while a coroutine blocks. Only the
    main thread of a process gets signals; on any other, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
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
    ray: ModuleType,
    plan: ClusterPlan,
    *,
    devices: Callable[[], Sequence[NodeDevices]],
    token: str,
) -> RayNode | None:
    """Connect to the cluster of the plan, after starting its head for ``local`` and ``head``.

    Args:
        devices: finds the devices of this node.
        token: the secret of a cluster that this call starts.

    Returns:
        the head's processes, which the caller closes; None if the cluster exists already.

    Raises:
        UserError: there is no cluster, or Ray does not accept ``ray_kwargs.ray_init``.
        RunFailure: Ray does not start, or the run cannot connect to what it has started.
    """
    given = {name: value for name, value in plan.settings.ray_init.items() if name != "address"}
    if plan.role == "existing":
        _probe(plan)
        _connect(ray, plan, address=plan.address, given=given)
        return None
    # ray.init, below, looks for this node by this address.
    options = {"node_ip_address": ray.util.get_node_ip_address()}
    options |= _head_options(plan, given=given, devices=devices())
    try:
        role = "head" if plan.role == "head" else "local"
        node, address = _start_patiently(options, role=role, token=token)
    except RayNodeError as error:
        if given and error.is_usage:
            raise _not_accepted(given, error) from None
        hint = "; if it is not, look at ray_kwargs.ray_init" if given else ""
        raise RunFailure(
            f"Ray did not start on this node ({_first_line(error)}). If the "
            f"machine is busy, try again{hint}"
        ) from None
    others = {name: value for name, value in given.items() if name not in _NODE_OPTIONS}
    try:
        _connect(ray, plan, address=address, given=others)
    except BaseException:
        node.close()
        raise
    return node


def _start_patiently(
    options: Mapping[str, Any], *, role: Literal["local", "head"], token: str
) -> tuple[RayNode, str]:
    """Start the head of a cluster, once more if it ends while it starts; see ``start_head``.

    Ray's raylet ends itself if its helpers, which import much, take longer than 15 s.
    """
    try:
        return start_head(options, role=role, token=token)
    except RayNodeError as error:
        if error.is_usage:
            raise
        logger.warning(
            "Ray did not start on this node (%s); it is started once more", _first_line(error)
        )
    return start_head(options, role=role, token=token)


def _head_options(
    plan: ClusterPlan, *, given: Mapping[str, Any], devices: Sequence[NodeDevices]
) -> dict[str, Any]:
    options: dict[str, Any] = {"include_log_monitor": bool(given.get("log_to_driver"))}
    if plan.role == "head":
        options |= {"system_config": _HEALTH_CHECKS, **_named_address(plan)}
    options |= {_NODE_OPTIONS[name]: given[name] for name in given.keys() & _NODE_OPTIONS}
    cores = os.cpu_count() or 1
    return options | node_resources(devices, num_cores=cores, settings=plan.settings)


@contextmanager
def _deferred_interrupt() -> Iterator[None]:
    """Deliver SIGINT behind the block: ended in the middle of it, Ray's library crashes the process
    at its end. A second one is delivered at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, received = signal.getsignal(signal.SIGINT), list[int]()

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if received:
        signal.raise_signal(signal.SIGINT)


def _connect(ray: ModuleType, plan: ClusterPlan, *, address: str, given: Mapping[str, Any]) -> None:
    quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with _deferred_interrupt(), dying_at_once():
            ray.init(**{**quiet, "address": address, **given})
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        if given and not isinstance(error, ConnectionError):
            raise _not_accepted(given, error) from error
        if plan.role != "existing":
            raise RunFailure(
                "Ray has started on this node, and the run cannot connect to it "
                f"({_first_line(error)}). If the machine is busy, try again"
            ) from error
        raise UserError(
            plan.source,
            plan.address,
            rule=_first_line(error),
            remedy="This machine must be one of the cluster's nodes: type "
            "`ray start --address=...` on it.",
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # ray.init replaces it


def _not_accepted(given: Mapping[str, Any], error: Exception) -> UserError:
    return UserError(
        "ray_kwargs.ray_init",
        given,
        rule=_first_line(error),
        remedy="Leave out what Ray does not accept.",
    )


@dataclass(frozen=True, slots=True)
class Reservation:
    """The devices of one planned node.

    Attributes:
        group: Ray's placement group.
        index: the number of the node's bundle in it.
        resources: all resources of the node that the bundle is on.
    """

    group: Any
    index: int
    address: str
    resources: Resources


def reserve(
    ray: ModuleType,
    plan: ClusterPlan,
    *,
    pools: Mapping[str, Sequence[int]],
    platforms: Mapping[str, Platform],
    absent_ranks: Callable[[], Sequence[int]],
) -> dict[int, Reservation]:
    """Reserve the devices of each planned node, each on a separate node of the cluster.

    Args:
        pools: the planned node number of each rank, by pool.
        platforms: the platform of each pool.
        absent_ranks: returns the ranks of the members that have not connected; raises NodeFailure
            if one that had has gone.

    Raises:
        NodeFailure: a member has gone.
        UserError: the nodes do not join in time, have too few devices, or their devices are in use.
    """
    needs = _wait_for_nodes(ray, plan, pools=pools, platforms=platforms, absent_ranks=absent_ranks)
    numbers = sorted(needs)
    group = ray.util.placement_group([needs[n] for n in numbers], strategy="STRICT_SPREAD")
    if not group.wait(_RESERVE_S):
        raise refusal(
            needs,
            _node_states(ray),
            platforms=platforms,
            settings=plan.settings,
            free=ray.available_resources(),
        )
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
    absent_ranks: Callable[[], Sequence[int]],
) -> dict[int, dict[str, float]]:
    """Wait until the cluster can hold the run. Return the resources that each planned node needs.

    Raise at once if all nodes are there and do not suffice.
    """
    settings = plan.settings
    deadline = time.monotonic() + (settings.wait_s if settings.num_nodes > 1 else 0)
    while True:
        nodes = _node_states(ray)
        totals = [node.resources for node in nodes]
        needs = node_needs(pools, platforms, marked=is_marked(nodes, platforms))
        if fits(list(needs.values()), totals):
            return needs
        absent = absent_ranks()
        is_late = time.monotonic() >= deadline
        if is_late and len(nodes) < settings.num_nodes:
            raise _missing_nodes(settings, len(nodes), absent=absent)
        # A cluster formed by the run is complete. Further nodes may still join an existing one.
        is_own = plan.role == "head"
        present = len(nodes) if is_own else num_equipped(totals, list(needs.values()))
        if is_late or present >= settings.num_nodes:
            raise refusal(needs, nodes, platforms=platforms, settings=settings)
        time.sleep(_POLL_S)


def _node_states(ray: ModuleType) -> list[NodeState]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [NodeState(node["NodeManagerAddress"], node["Resources"]) for node in alive]


def _missing_nodes(
    settings: ClusterSettings, num_present: int, *, absent: Sequence[int]
) -> UserError:
    ranks = f" (NODE_RANK {', '.join(map(str, absent))})" if absent else ""
    return UserError(
        "trainer.nnodes",
        settings.num_nodes,
        rule=f"only {num_present} of them are there after {settings.wait_s:g} s",
        remedy=f"Start the others{ranks}, or raise trainer.ray_wait_register_center_timeout.",
    )


def assign_workers(
    pools: Mapping[str, Sequence[int]],
    reserved: Mapping[int, Reservation],
    *,
    platforms: Mapping[str, Platform],
) -> list[WorkerAssignment]:
    """Return the assignments of all ranks of all pools.

    Args:
        pools: the planned node number of each rank, by pool.
    """
    on_node = Counter(node for nodes in pools.values() for node in nodes)
    assignments = []
    for pool, nodes in pools.items():
        visibility = platforms[pool].visibility
        for rank, node in enumerate(nodes):
            place = WorkerPlace(
                pool=pool,
                rank=rank,
                size=len(nodes),
                node=node,
                node_address=reserved[node].address,
                wants_flagcx=os.environ.get(FLAGCX_VARIABLE, "").lower() in ("1", "true"),
            )
            cores = (os.cpu_count() or 1) // on_node[node]
            is_host = visibility.mode == "none"
            num_threads = 1 if is_host else max(1, min(cores, _MAX_HOST_THREADS))
            capacity = int(reserved[node].resources[visibility.resource])
            assignments.append(
                WorkerAssignment(place, visibility, capacity, os.getcwd(), num_threads)
            )
    return assignments


def require_distinct(
    infos: Sequence[WorkerInfo], uuids: Sequence[str], *, platforms: Mapping[str, Platform]
) -> None:
    """Raise UserError if two processes use one device of a node, even under different names.

    Args:
        uuids: the ``Platform.device_uuid`` of each process.
        platforms: the platform of each pool.
    """
    taken: dict[tuple[str, str, str], WorkerInfo] = {}
    for one, uuid in zip(infos, uuids, strict=True):
        place = one.place
        # A part of a device may have the uuid of the whole; its own name tells it apart.
        part = place.physical_id if place.physical_id.startswith(_MIG_PREFIX) else ""
        resource = platforms[place.pool].visibility.resource
        for kind, name in ((resource, place.physical_id), (f"uuid {part}", uuid)):
            other = taken.setdefault((place.node_address, kind, name), one)
            if name and other is not one:
                raise UserError(
                    f"device {name} of {one.host}",
                    rule=f"{_described(other)} and {_described(one)} were both given it "
                    f"({one.isolation})",
                    remedy="Unset what makes Ray share devices, or what lists one by two names.",
                )


def _described(info: WorkerInfo) -> str:
    return f"{info.place.pool} rank {info.place.rank} (as device {info.place.physical_id})"


def _probe(plan: ClusterPlan) -> None:
    """Raise UserError unless a cluster answers; ray.init may wait for one for minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "status"]
    command += [] if plan.address == "auto" else [f"--address={plan.address}"]
    try:
        if plan.address != "auto":
            socket.create_connection(plan.host_and_port, timeout=_CONNECT_S).close()
        subprocess.run(command, check=True, capture_output=True, timeout=_PROBE_S)
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise UserError(
            plan.source,
            plan.address,
            rule="no Ray cluster answers there",
            remedy="Correct or unset it, or start one with `ray start --head`.",
        ) from error


def _named_address(plan: ClusterPlan) -> dict[str, str]:
    """Return MASTER_ADDR as this node's address, unless it is another's, such as a proxy's.

    Ray then determines the address itself.
    """
    host, _ = plan.host_and_port
    address = address_here(host)
    return {"node_ip_address": address} if address else {}


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
    return line.rstrip(".")
