# SPDX-License-Identifier: Apache-2.0
"""The resources that a run needs on each node, as Ray names them, and whether a cluster has them.

Ray calls the devices of several vendors GPU. If nodes differ, each declares the platform of its
devices by a marker resource, and a run takes a tiny amount of the marker of each platform that it
needs on a node. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem.errors import UserError

if TYPE_CHECKING:
    from tandem.platforms.record import Platform
    from tandem.runtime.cluster import ClusterSettings, NodeDevices

MARKER = "acc_"
"""The prefix of the names of marker resources."""
_HOST = "CPU"
_SHARE = 1e-4
"""Ray's smallest amount: a node's marker is never used up."""

_HOST_RESOURCES = (_HOST, "memory", "object_store_memory")
"""Resources that Ray finds on any node, beside its address as ``node:...``."""

Resources = Mapping[str, float]
"""Amounts by Ray's name."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node of the cluster.

    Attributes:
        resources: all its resources, including those in use.
        problems: why devices of a platform cannot be used here, by the platform's name.
    """

    address: str
    resources: Resources
    problems: Mapping[str, str] = field(default_factory=dict[str, str])


def this_machine(devices: Sequence[NodeDevices], *, num_cores: int) -> NodeState:
    """Return the state of this machine before Ray is started, from the devices found on it."""
    resources: dict[str, float] = {_HOST: num_cores}
    for own in devices:
        if own.number:
            resources |= {own.visibility.resource: own.number, own.marker: 1}
    problems = {own.marker.removeprefix(MARKER): own.problem for own in devices if own.problem}
    return NodeState("this machine", resources, problems)


def marker_of(platform: Platform) -> str:
    """Return the marker resource of a platform; "" for the host.

    Example:
        >>> marker_of(MUSA)
        'acc_musa'
    """
    return "" if platform.visibility.mode == "none" else MARKER + platform.name


def node_needs(
    pools: Mapping[str, Sequence[int]], platforms: Mapping[str, Platform], *, marked: bool
) -> dict[int, dict[str, float]]:
    """Return the resources that each planned node must have: the devices, and a CPU per worker.

    Args:
        pools: the planned node number of each rank, by pool.
        platforms: the platform of each pool.
        marked: whether nodes declare their platforms.

    Raises:
        UserError: as ``require_told_apart``.

    Example:
        >>> node_needs({"train": [0, 0]}, {"train": NPU}, marked=True)
        {0: {'CPU': 2, 'NPU': 2, 'acc_npu': 0.0001}}
    """
    require_told_apart(
        (node, platforms[pool].visibility.resource, platforms[pool].name)
        for pool, nodes in pools.items()
        for node in nodes
    )
    found: dict[int, dict[str, float]] = {}
    for pool, nodes in pools.items():
        platform = platforms[pool]
        resource = platform.visibility.resource
        for node, number in Counter(nodes).items():
            needed = found.setdefault(node, {_HOST: 0})
            needed[_HOST] += number
            if platform.visibility.mode == "none":
                continue
            needed[resource] = needed.get(resource, 0) + number
            if marked:
                needed[marker_of(platform)] = _SHARE
    return found


def require_told_apart(devices: Iterable[tuple[int, str, str]]) -> None:
    """Raise UserError if a node would have devices of two vendors that Ray cannot tell apart.

    Args:
        devices: for each the number of its node, Ray's name for it, and its platform's name.
    """
    owners: dict[tuple[int, str], str] = {}
    for node, resource, name in devices:
        owner = owners.setdefault((node, resource), name)
        if owner != name and resource != _HOST:
            raise UserError(
                "pools.*.platform",
                rule=f"node {node} would have devices of {owner} and of {name}, which Ray both "
                f"calls {resource}",
                remedy="Place them on separate nodes: trainer.nnodes of at least 2, divided by "
                "trainer.separated_node_ratios.",
            )


def is_marked(nodes: Sequence[NodeState], platforms: Mapping[str, Platform]) -> bool:
    """Return whether nodes declare platforms, as they must if a run has several."""
    says = any(name.startswith(MARKER) for node in nodes for name in node.resources)
    return says or len({platform.name for platform in platforms.values()}) > 1


def num_equipped(nodes: Sequence[Resources], needs: Sequence[Resources]) -> int:
    """Return the number of nodes that the run might use.

    If all planned nodes need devices, only nodes with some device count: the first node of a
    cluster often has none.

    Example:
        >>> num_equipped([{"CPU": 4}, {"CPU": 4, "GPU": 1}], [{"CPU": 1, "GPU": 1}])
        1
    """
    if any(need.keys() == {_HOST} for need in needs):
        return len(nodes)
    return sum(any(_is_device(name) for name in node) for node in nodes)


def _is_device(resource: str) -> bool:
    return resource not in _HOST_RESOURCES and not resource.startswith("node:")


def fits(needs: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Return whether each planned node fits on a separate node (bipartite matching).

    Example:
        >>> fits([{"GPU": 1}, {"NPU": 1}], [{"NPU": 2, "GPU": 1}, {"NPU": 1}])
        True
    """
    taken_by: dict[int, int] = {}

    def place(need: int, passed: set[int]) -> bool:
        for index, node in enumerate(nodes):
            if index in passed or any(node.get(k, 0) < v for k, v in needs[need].items()):
                continue
            passed.add(index)
            if index not in taken_by or place(taken_by[index], passed):
                taken_by[index] = need
                return True
        return False

    return all(place(need, set()) for need in range(len(needs)))


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table in a refusal: a resource, on nodes with the marker if there is one."""

    name: str
    resource: str
    marker: str = ""

    def of(self, resources: Resources) -> float:
        """Return the amount."""
        is_there = not self.marker or self.marker in resources
        return resources.get(self.resource, 0) if is_there else 0


def refusal(
    needs: Mapping[int, Resources],
    nodes: Sequence[NodeState],
    *,
    platforms: Mapping[str, Platform],
    settings: ClusterSettings,
    free: Resources | None = None,
) -> UserError:
    """Return the error for a run that does not fit: a table of the needed and present resources.

    Args:
        needs: the resources that each planned node must have.
        platforms: the platform of each pool.
        free: the free resources of the cluster, if the run would fit without other users.
    """
    devices = {p.name: p for p in platforms.values() if marker_of(p)}.values()
    columns = [_Column(p.name, p.visibility.resource, marker_of(p)) for p in devices]
    if not is_marked(nodes, platforms):
        columns = [_Column(column.resource, column.resource) for column in columns]
    columns.append(_Column(_HOST, _HOST))
    wanted = "; ".join(f"node {number} {_row(need, columns)}" for number, need in needs.items())
    there = "; ".join(
        f"{node.address} {_row(node.resources, columns, problems=node.problems)}" for node in nodes
    )
    if free is not None:
        unmarked = [_Column(column.name, column.resource) for column in columns]
        rule, remedy = "others use what the run needs", "Wait until they have ended, or lower these"
        there = f"{there}. Free: {_row(free, unmarked)}"
    else:
        rule, remedy = "the nodes cannot hold the run", _remedy(columns, nodes)
    return UserError(
        settings.sizes_key,
        settings.num_nodes,
        rule=f"{rule}. Needed: {wanted}. There: {there or 'nothing'}",
        remedy=f"{remedy}.",
    )


def _row(
    resources: Resources, columns: Sequence[_Column], *, problems: Mapping[str, str] | None = None
) -> str:
    reasons = problems or {}
    return ", ".join(
        f"{column.of(resources):g} {column.name}"
        + (f" ({reasons[column.name]})" if column.name in reasons else "")
        for column in columns
        if column.of(resources) or column.name in reasons
    )


def _remedy(columns: Sequence[_Column], nodes: Sequence[NodeState]) -> str:
    missing = [c for c in columns if not any(c.of(node.resources) for node in nodes)]
    if any(node.problems for node in nodes):
        return (
            "Name platforms that are here (tandem doctor lists them), or use a Ray cluster that "
            "has them (RAY_ADDRESS)"
        )
    if not missing:
        return (
            "Lower these, or use nodes with more; the number of CPUs is the one declared to Ray "
            "(ray_kwargs.ray_init.num_cpus, ray start --num-cpus)"
        )
    if missing[0].marker:
        return (
            f"Start Ray on a node that has them with --resources='{{\"{missing[0].marker}\": 1}}', "
            "or name platforms that are there in pools.*.platform"
        )
    return f"Choose a platform that is there (trainer.device), or nodes with {missing[0].name}s"
