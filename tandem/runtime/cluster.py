# SPDX-License-Identifier: Apache-2.0
"""The choice of a run's Ray cluster: its own, one that exists, or one that its nodes form.

Pure functions of the settings and the environment. Nothing is started here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tandem.errors import UserError
from tandem.platforms.isolation import Visibility

DEFAULT_PORT = 29500
"""The default of MASTER_PORT, as in torch's launcher."""
_MAX_PORT = 65535
_RANK_VARIABLES = ("NODE_RANK", "RANK")
_QUANTITIES = ("num_cpus", "num_gpus", "object_store_memory")
"""Ray's built-in resources of a node, as arguments of ray.init."""


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The configuration of a run's cluster.

    Attributes:
        num_nodes: ``trainer.nnodes``.
        devices_per_node: ``trainer.n_gpus_per_node``.
        wait_s: ``trainer.ray_wait_register_center_timeout``.
        timeout_s: ``nccl_timeout``, which also bounds how long a worker may hang.
        restarts: whether a failed run may start again, as ``trainer.max_restarts`` says.
        ray_init: ``ray_kwargs.ray_init``, the keyword arguments of ray.init.
    """

    num_nodes: int
    devices_per_node: int
    wait_s: float = 300
    timeout_s: float = 600
    restarts: bool = False
    ray_init: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def sizes_key(self) -> str:
        """The key of a UserError about the number of devices and nodes."""
        return f"trainer.n_gpus_per_node={self.devices_per_node}, trainer.nnodes"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The role of this process in the cluster of a run.

    Attributes:
        role: ``local`` for a cluster of this machine alone; ``existing`` for one at ``address``;
            ``head`` and ``member`` for one that the nodes of this run form, which meet at
            ``address``.
        address: host:port; "" for ``local``.
        source: the variable or key that gave the address, for messages.
        node_rank: the rank of a head (0) or member.
        devices: the devices of this node; None if they have not been probed.
    """

    role: Literal["local", "existing", "head", "member"]
    settings: ClusterSettings
    address: str = ""
    source: str = ""
    node_rank: int = 0
    devices: tuple[NodeDevices, ...] | None = None

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of ``address``, which must have a port."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)


def plan_cluster(settings: ClusterSettings, environment: Mapping[str, str]) -> ClusterPlan:
    """Return the role of this process, from the settings and the launcher's variables.

    Raises:
        UserError: several nodes have no address at which to meet, the variables contradict the
            settings, or a quantity of ``ray_kwargs.ray_init`` is invalid.
    """
    _check_quantities(settings.ray_init)
    configured = settings.ray_init.get("address")
    source = "ray_kwargs.ray_init.address" if configured else "RAY_ADDRESS"
    address = str(configured or environment.get("RAY_ADDRESS", ""))
    if address and address != "local":
        _check_address(address, source)
        return ClusterPlan("existing", settings, address, source)
    if settings.num_nodes == 1:
        return ClusterPlan("local", settings)
    rank_variable = next((name for name in _RANK_VARIABLES if environment.get(name)), None)
    if not environment.get("MASTER_ADDR") or rank_variable is None:
        raise UserError(
            "trainer.nnodes",
            settings.num_nodes,
            rule="no environment variable tells the nodes how to find each other",
            remedy="Run `ray start --head --port=6379` on one node and "
            "`ray start --address=THAT_NODE:6379` on each other, then this command on the first "
            "with RAY_ADDRESS=auto; or this command on every node with MASTER_ADDR=FIRST_NODE and "
            "NODE_RANK=0, 1, ...",
        )
    rank = _number(rank_variable, environment[rank_variable])
    if rank >= settings.num_nodes:
        raise UserError(
            rank_variable,
            rank,
            rule=f"must be below trainer.nnodes={settings.num_nodes}",
            remedy="Give the nodes the ranks 0, 1, ..., or raise trainer.nnodes.",
        )
    port = _number("MASTER_PORT", environment.get("MASTER_PORT") or str(DEFAULT_PORT))
    if not 1 <= port <= _MAX_PORT:
        raise UserError(
            "MASTER_PORT",
            port,
            rule=f"must be from 1 to {_MAX_PORT}",
            remedy="Set the same one on every node.",
        )
    address = f"{environment['MASTER_ADDR']}:{port}"
    role = "member" if rank else "head"
    return ClusterPlan(role, settings, address, "MASTER_ADDR", node_rank=rank)


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """The devices of one platform that a process on this node sees.

    Attributes:
        marker: the resource that names the platform; "" where all nodes have the same one.
        problem: why there are no devices, "" if there are.
    """

    visibility: Visibility
    number: int
    marker: str = ""
    problem: str = ""


def node_resources(
    devices: Sequence[NodeDevices], *, num_cores: int, settings: ClusterSettings
) -> dict[str, Any]:
    """Return the resources that a node of the run declares to Ray, as arguments of ray.init.

    Ray detects all others itself. Every worker uses a CPU besides its device.
    """
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
    for name in _QUANTITIES:
        if settings.ray_init.get(name) is not None:
            resources[name] = int(settings.ray_init[name])
    others |= settings.ray_init.get("resources") or {}
    return resources | ({"resources": others} if others else {})


def _check_address(address: str, source: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto" and ("://" in address or not host or not port.isdecimal()):
        raise UserError(
            source,
            address,
            rule="must be auto, or HOST:PORT of a running Ray cluster that has this machine as a "
            "node",
            remedy="`ray status` on the cluster's head shows it.",
        )


def _check_quantities(ray_init: Mapping[str, Any]) -> None:
    # Ray merely asserts some of these, and ``node_resources`` fails on others.
    resources = ray_init.get("resources") or {}
    if not isinstance(resources, Mapping):
        raise UserError(
            "ray_kwargs.ray_init.resources",
            resources,
            rule="must map names to numbers",
            remedy="Write 'ray_kwargs.ray_init.resources={NAME:1}', or leave it out.",
        )
    quantities = {name: ray_init[name] for name in _QUANTITIES if ray_init.get(name) is not None}
    quantities |= {f"resources.{name}": number for name, number in resources.items()}
    for name, number in quantities.items():
        if not isinstance(number, int | float) or number < 0 or number % 1:
            raise UserError(
                f"ray_kwargs.ray_init.{name}",
                number,
                rule="must be a whole number from 0 on",
                remedy="Correct it, or leave it out.",
            )


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UserError(
            name, text, rule="must be a number from 0 on", remedy="Set it on every node."
        )
    return int(text)
