# SPDX-License-Identifier: Apache-2.0
"""Which Ray cluster a run uses: one of its own, one that exists, or one that its nodes form.

Pure: the decision from settings and environment, and the arithmetic of what fits. Nothing is
started here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import UserError
from tandem.platforms.isolation import Visibility

DEFAULT_PORT = 29500
"""Where the nodes of a run meet if MASTER_PORT does not say; the default of torch's launcher."""
_MAX_PORT = 65535
_RANK_VARIABLES = ("NODE_RANK", "RANK")
_QUANTITIES = ("num_cpus", "num_gpus", "object_store_memory")
"""What a node has of Ray's own resources, in ray.init's words."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What a run asks for.

    Attributes:
        num_nodes: ``trainer.nnodes``.
        devices_per_node: ``trainer.n_gpus_per_node``.
        wait_s: ``trainer.ray_wait_register_center_timeout``.
        timeout_s: ``nccl_timeout``; it bounds how long a worker may hang too.
        ray_init: ``ray_kwargs.ray_init``: passed to ray.init.
    """

    num_nodes: int
    devices_per_node: int
    wait_s: float = 300
    timeout_s: float = 600
    ray_init: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """This process's part.

    Attributes:
        role: ``local``: a cluster of this machine alone. ``existing``: one at ``address``. ``head``
            and ``member``: one that the nodes of this run form; they meet at ``address``.
        address: host:port; "" for ``local``.
        source: where the address comes from, for messages.
        node_rank: of a head (0) or member.
        devices: of this node, if they have been looked for already.
    """

    role: Literal["local", "existing", "head", "member"]
    settings: ClusterSettings
    address: str = ""
    source: str = ""
    node_rank: int = 0
    devices: tuple[OwnDevices, ...] | None = None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """``address`` in its parts; ask only if it has a port."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


def plan_cluster(settings: ClusterSettings, environment: Mapping[str, str]) -> ClusterPlan:
    """What this process is to do, told by the settings and the launcher's variables.

    Raises:
        UserError: several nodes are asked for and nothing says how they find each other, the
            variables contradict the settings, or Ray could not take its own.
    """
    _check_quantities(settings.ray_init)
    asked = settings.ray_init.get("address")
    source = "ray_kwargs.ray_init.address" if asked else "RAY_ADDRESS"
    address = str(asked or environment.get("RAY_ADDRESS", ""))
    if address and address != "local":
        _check_address(address, source)
        return ClusterPlan("existing", settings, address, source)
    if settings.num_nodes == 1:
        return ClusterPlan("local", settings)
    rank_variable = next((name for name in _RANK_VARIABLES if environment.get(name)), None)
    if not environment.get("MASTER_ADDR") or rank_variable is None:
        raise UserError(
            f"trainer.nnodes={settings.num_nodes}: nothing says where the other nodes are. Type "
            "`ray start --head --port=6379` on one node and `ray start --address=THAT_NODE:6379` "
            "on each other, then this command on the first with RAY_ADDRESS=auto; or this command "
            "on every node with MASTER_ADDR=FIRST_NODE and NODE_RANK=0, 1, ..."
        )
    rank = _number(rank_variable, environment[rank_variable])
    if rank >= settings.num_nodes:
        raise UserError(
            f"{rank_variable}={rank}: must be below trainer.nnodes={settings.num_nodes}. "
            "Give the nodes the ranks 0, 1, ..., or raise trainer.nnodes."
        )
    port = _number("MASTER_PORT", environment.get("MASTER_PORT") or str(DEFAULT_PORT))
    if not 1 <= port <= _MAX_PORT:
        raise UserError(
            f"MASTER_PORT={port}: must be from 1 to {_MAX_PORT}. Set the same one on every node."
        )
    address = f"{environment['MASTER_ADDR']}:{port}"
    role = "member" if rank else "head"
    return ClusterPlan(role, settings, address, "MASTER_ADDR", node_rank=rank)


@dataclass(frozen=True, slots=True)
class OwnDevices:
    """Devices of one platform that a process on this node sees; ``marker`` says whose they are, ""
    where all nodes have the same; ``problem`` why there are none."""

    visibility: Visibility
    number: int
    marker: str = ""
    problem: str = ""


def node_resources(
    devices: Sequence[OwnDevices], *, num_cores: int, settings: ClusterSettings
) -> dict[str, Any]:
    """What a node that is started for a run declares to Ray beyond what Ray finds by itself, in
    ray.init's words. Every worker takes a CPU, whatever else it takes."""
    resources: dict[str, Any] = {"num_cpus": max(num_cores, settings.devices_per_node)}
    others: dict[str, float] = {}
    for own in devices:
        if own.marker and not own.number:
            continue
        if not own.visibility.is_known_to_ray:
            resources["num_gpus"] = own.number
        elif own.marker and own.visibility.resource != "GPU":
            others[own.visibility.resource] = own.number
        if own.marker:
            others[own.marker] = 1
    given = {name: settings.ray_init[name] for name in _QUANTITIES if name in settings.ray_init}
    resources |= given
    others |= settings.ray_init.get("resources") or {}
    return resources | ({"resources": others} if others else {})


def require_fit(
    needs: Mapping[int, int], capacities: Sequence[int], *, settings: ClusterSettings, what: str
) -> None:
    """Check that every node of the plan finds one of the cluster with enough devices.

    Args:
        needs: devices by number of the planned node.
        capacities: devices of each node that is there.
        what: the resource, for the message.

    Raises:
        UserError: they do not fit.
    """
    if fits(list(needs.values()), capacities):
        return
    counted = sorted(Counter(capacities).items(), reverse=True)
    there = ", ".join(f"{capacity} on {number} node(s)" for capacity, number in counted)
    remedy = f"Set trainer.n_gpus_per_node={max(capacities, default=0)} or less"
    if not any(capacities):
        remedy = f"Choose a platform that is here (trainer.device), or nodes with {what}s"
    elif len(capacities) < settings.num_nodes:
        remedy = "Lower trainer.nnodes, or add nodes to the cluster"
    elif what == "CPU":
        remedy += ", or raise ray_kwargs.ray_init.num_cpus"
    raise UserError(
        f"trainer.n_gpus_per_node={settings.devices_per_node}, trainer.nnodes="
        f"{settings.num_nodes}: more devices than exist. "
        f"Ray finds {what}s: {there or 'none'}. {remedy}."
    )


def fits(needs: Sequence[int], capacities: Sequence[int]) -> bool:
    """Whether each need finds a node of its own.

    Example:
        >>> fits([4, 8], [8, 4]), fits([4, 4], [8])
        (True, False)
    """
    ordered = zip(sorted(needs, reverse=True), sorted(capacities, reverse=True), strict=False)
    return len(needs) <= len(capacities) and all(need <= there for need, there in ordered)


def _check_address(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdecimal()):
        raise UserError(
            f"{source}={address}: must be HOST:PORT of a running Ray cluster that this machine is "
            "a node of, or auto. `ray status` on its head shows it."
        )


def _check_quantities(ray_init: Mapping[str, Any]) -> None:
    """Ray takes whole numbers from 0 on, and looks itself for what is None; of some others it only
    asserts, and some would fail here before it sees them."""
    resources = ray_init.get("resources") or {}
    if not isinstance(resources, Mapping):
        raise UserError(
            f"ray_kwargs.ray_init.resources={resources}: must map names to numbers. Write "
            "'ray_kwargs.ray_init.resources={NAME:1}', or leave it out."
        )
    quantities = {name: ray_init.get(name) for name in _QUANTITIES}
    quantities |= {f"resources.{name}": number for name, number in resources.items()}
    for name, number in quantities.items():
        is_left_out = number is None and name in _QUANTITIES
        if not is_left_out and not _is_quantity(number):
            raise UserError(
                f"ray_kwargs.ray_init.{name}={number}: must be a whole number from 0 on. "
                "Correct it, or leave it out."
            )


def _is_quantity(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0 and value % 1 == 0


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(f"{name}={text}: must be a number from 0 on. Set it on every node.")
    return int(text)
