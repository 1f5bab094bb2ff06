# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run take of each node, in Ray's words, and whether a cluster has it. Pure.

Ray calls the devices of several vendors GPU. Where nodes differ, each says whose it has by a marker
resource, and a run takes a little of the marker of every platform that it needs on a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.errors import UserError

if TYPE_CHECKING:
    from tandem.platforms.record import Platform
    from tandem.runtime.cluster import OwnDevices

MARKER = "acc_"
"""What the names of marker resources begin with."""
_HOSTS = "CPU"
_SHARE = 1e-4
"""Ray's smallest: a node's marker is never used up."""

_OF_HOSTS = ("CPU", "memory", "object_store_memory")
"""What Ray finds on any node, beside its address as ``node:...``."""

Resources = Mapping[str, float]
"""Amounts by Ray's name."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node of the cluster: what it has, and what of it nobody uses."""

    address: str
    total: Resources
    free: Resources


def marker_of(platform: Platform) -> str:
    """The resource by which a node says that it has such devices; "" for the host's own.

    Example:
        >>> marker_of(MUSA)
        'acc_musa'
    """
    return "" if platform.visibility.mode == "none" else MARKER + platform.name


def demands(
    pools: Mapping[str, Sequence[int]], platforms: Mapping[str, Platform], *, marked: bool
) -> dict[int, dict[str, float]]:
    """What each planned node must have, by its number: a CPU for each worker, and the devices.

    Args:
        pools: per pool the number of the planned node of each rank.
        platforms: of each pool.
        marked: whether nodes say what they have.

    Raises:
        UserError: as ``require_told_apart``.

    Example:
        >>> demands({"train": [0, 0]}, {"train": NPU}, marked=True)
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
            needed = found.setdefault(node, {"CPU": 0})
            needed["CPU"] += number
            if platform.visibility.mode == "none":
                continue
            needed[resource] = needed.get(resource, 0) + number
            if marked:
                needed[marker_of(platform)] = _SHARE
    return found


def require_told_apart(devices: Iterable[tuple[int, str, str]]) -> None:
    """Raise UserError if a node is to have devices of two vendors which Ray cannot tell apart.

    Args:
        devices: of each the number of its node, Ray's name for it, and its platform's.
    """
    owners: dict[tuple[int, str], str] = {}
    for node, resource, name in devices:
        owner = owners.setdefault((node, resource), name)
        if owner != name and resource != _HOSTS:
            raise UserError(
                f"pools.*.platform: node {node} would have devices of {owner} and of {name}, which "
                f"Ray both calls {resource}. Give each nodes of its own: trainer.nnodes of at "
                "least 2, divided by trainer.separated_node_ratios."
            )


def is_marked(nodes: Sequence[NodeState], platforms: Mapping[str, Platform]) -> bool:
    """Whether nodes say whose devices they have: they must where a run has several platforms."""
    says = any(name.startswith(MARKER) for node in nodes for name in node.total)
    return says or len({platform.name for platform in platforms.values()}) > 1


def num_equipped(nodes: Sequence[Resources], needs: Sequence[Resources]) -> int:
    """Of the nodes those that a run may be meant for: with devices of any sort, if all of its nodes
    need some. A cluster's first node often has none.

    Example:
        >>> num_equipped([{"CPU": 4}, {"CPU": 4, "GPU": 1}], [{"CPU": 1, "GPU": 1}])
        1
    """
    if any(need.keys() == {"CPU"} for need in needs):
        return len(nodes)
    return sum(any(_is_device(name) for name in node) for node in nodes)


def _is_device(resource: str) -> bool:
    return resource not in _OF_HOSTS and not resource.startswith("node:")


def is_held(needs: Sequence[Resources], nodes: Sequence[Resources]) -> bool:
    """Whether each need finds a node of its own.

    Example:
        >>> is_held([{"GPU": 1}, {"NPU": 1}], [{"NPU": 2, "GPU": 1}, {"NPU": 1}])
        True
    """
    takers: dict[int, int] = {}  # of nodes: which need has it

    def place(need: int, passed: set[int]) -> bool:
        for index, node in enumerate(nodes):
            if index in passed or any(node.get(k, 0) < v for k, v in needs[need].items()):
                continue
            passed.add(index)
            if index not in takers or place(takers[index], passed):
                takers[index] = need
                return True
        return False

    return all(place(need, set()) for need in range(len(needs)))


def refuse(
    needs: Mapping[int, Resources], nodes: Sequence[NodeState], *, platforms: Mapping[str, Platform]
) -> UserError:
    """The error of a run that a cluster cannot hold, though it may have enough of everything: it
    lists what each planned node needs, and what there is."""
    if not is_marked(nodes, platforms):
        resource = next(iter(platforms.values())).visibility.resource
        return _refuse_unmarked(needs, nodes, resource=resource)
    distinct = list({platform.name: platform for platform in platforms.values()}.values())
    wanted = "; ".join(f"node {number}: {_words(need, distinct)}" for number, need in needs.items())
    there = [_supply(platform, nodes) for platform in distinct]
    missing = [
        marker_of(platform)
        for platform in distinct
        if marker_of(platform) and not _having(platform, nodes)
    ]
    remedy = "Lower trainer.n_gpus_per_node, or add nodes"
    if missing:
        remedy = (
            f"Start Ray on a node that has them with --resources='{{\"{missing[0]}\": 1}}', or "
            "name platforms that are there in pools.*.platform"
        )
    return UserError(
        f"pools.*.platform: the cluster's {len(nodes)} node(s) cannot hold the run ({wanted}). "
        f"Free: {', '.join(there)}. {remedy}."
    )


def require_here(need: Resources, devices: Sequence[OwnDevices], *, num_cores: int) -> None:
    """Raise UserError unless this machine has what a run on it alone needs.

    Args:
        need: of the run's only node.
        devices: of each platform but the host's what there is.
    """
    found = {own.marker.removeprefix(MARKER): own for own in devices}
    wanted = {
        name: need[own.visibility.resource] for name, own in found.items() if own.marker in need
    }
    short = [name for name, number in wanted.items() if found[name].number < number]
    if not short:
        return
    num_hosts = need[_HOSTS] - sum(wanted.values())
    words = [f"{number:g} {name}" for name, number in wanted.items()]
    words += [f"{num_hosts:g} {_HOSTS.lower()}"] if num_hosts else []
    there = [
        f"{name} {own.number}{f' ({own.problem})' if own.problem else ''}"
        for name, own in found.items()
    ]
    there.append(f"{_HOSTS.lower()} {num_cores}")
    remedy = "Lower trainer.n_gpus_per_node"
    if any(found[name].problem for name in short):
        remedy = "Name platforms that are here (tandem doctor lists them)"
    raise UserError(
        f"pools.*.platform: this machine cannot hold the run ({' and '.join(words)}). "
        f"Free: {', '.join(there)}. {remedy}, or use a Ray cluster that has them (RAY_ADDRESS)."
    )


def _refuse_unmarked(
    needs: Mapping[int, Resources], nodes: Sequence[NodeState], *, resource: str
) -> UserError:
    """Of one platform, whose nodes all have the same sort of devices."""

    def words(amounts: Resources) -> str:
        names = dict.fromkeys(("CPU", resource))
        return " and ".join(f"{amounts[name]:g} {name}" for name in names if amounts.get(name))

    wanted = "; ".join(f"node {number}: {words(need)}" for number, need in needs.items())
    there = ", ".join(f"{words(node.total)} on {node.address}" for node in nodes)
    return UserError(
        f"trainer.n_gpus_per_node: no node has all that one of the run needs ({wanted}). "
        f"There are: {there}. Lower trainer.n_gpus_per_node, or start Ray with more on a node "
        "(--num-cpus)."
    )


def _words(need: Resources, platforms: Sequence[Platform]) -> str:
    devices = {
        platform.name: need[platform.visibility.resource]
        for platform in platforms
        if marker_of(platform) in need
    }
    others = need["CPU"] - sum(devices.values())
    parts = devices | ({"cpu": others} if others else {})
    return " and ".join(f"{number:g} {name}" for name, number in parts.items())


def _having(platform: Platform, nodes: Sequence[NodeState]) -> list[NodeState]:
    marker = marker_of(platform)
    return [node for node in nodes if not marker or marker in node.total]


def _supply(platform: Platform, nodes: Sequence[NodeState]) -> str:
    resource, having = platform.visibility.resource, _having(platform, nodes)
    free = sum(node.free.get(resource, 0) for node in having)
    total = sum(node.total.get(resource, 0) for node in having)
    where = f" on {', '.join(node.address for node in having)}" if having else ""
    return f"{platform.name} {free:g} of {total:g}{where}"
