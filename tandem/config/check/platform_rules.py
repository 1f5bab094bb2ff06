# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the platforms that pools name, one line each, and how weights cross between
them. Names are compared as they are written; whether such a platform exists is not asked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby

from tandem.config.derived.pools import (
    Placement,
    Pool,
    named_platforms,
    place_run,
    show_groups,
    task_groups,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

_HOST = "cpu"
_UNKNOWN = "auto"
_TRANSPORT = "pools.transport"
_TURNS = ("actor-train", "generate")


def platform_key(pool: Pool, config: RunConfig | SftConfig) -> str:
    """The key that named a pool's platform."""
    keys: list[str] = []
    if isinstance(config, RunConfig):
        named = config.pools.named
        keys = [f"pools.{task}.platform" for task in pool.tasks if task in named]
    return next(iter(keys), "trainer.device")


def platform_problems(config: RunConfig) -> Iterator[str]:
    """Of the platforms of ``tandem train``, whose groups of tasks make sense."""
    problems = [
        problem for tasks in task_groups(config) for problem in _group_problems(config, tasks)
    ]
    yield from problems
    if not problems:
        yield from placement_problems(config, place_run(config))


def placement_problems(config: RunConfig, placement: Placement) -> Iterator[str]:
    """Of pools whose platforms ``placement`` names. One that is still to be found could be any of
    the others', and is not judged."""
    yield from _order_problems(config, placement)
    yield from _transport_problems(config, placement)


def known_platforms(placement: Placement) -> list[str]:
    """Those of the pools with something to do, in their order, as often as they stand there; none
    for a pool whose platform is still to be found."""
    return [pool.platform for pool in placement.used_pools if pool.platform != _UNKNOWN]


def weight_ways(config: RunConfig, placement: Placement) -> dict[str, str]:
    """How weights travel between each two pools that share them, as far as it is known before the
    processes start."""
    pools = [pool for pool in placement.used_pools if {*pool.tasks} - {"ref_logp"}]
    return {
        f"{one.name} -> {other.name}": _way(one, other, wanted=config.pools.transport)
        for one, other in combinations(sorted(pools, key=_is_receiver), 2)
        if "actor-train" in one.tasks
    }


def _is_receiver(pool: Pool) -> bool:
    return "actor-train" not in pool.tasks


def _way(one: Pool, other: Pool, *, wanted: str) -> str:
    if one.platform == other.platform:
        return "collective (one platform)" if wanted == "auto" else f"{wanted} (as asked for)"
    if wanted not in ("auto", "staged"):
        return f"{wanted} (as asked for): from {one.platform} to {other.platform}"
    if wanted == "auto" and _UNKNOWN in (one.platform, other.platform):
        return "collective if auto finds the platform of the other pool, else staged"
    reason = "as asked for" if wanted == "staged" else "two platforms"
    crossing = f"from {one.platform} to {other.platform} once, then collective inside"
    return f"staged ({reason}): {crossing}"


def _group_problems(config: RunConfig, tasks: Sequence[str]) -> Iterator[str]:
    """Of tasks that share devices."""
    named = {task: name for task, name in named_platforms(config).items() if task in tasks}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"pools.{task}.platform={name}" for task, name in named.items())
        yield (
            f"{listed}: these tasks share devices, which are of one platform. Name one, or give "
            "them pools of their own with trainer.separated_node_tasks."
        )
    elif named and all(task in tasks for task in _TURNS):
        task, name = next(iter(named.items()))
        silent = [task for task in _TURNS if task not in named]
        if silent and config.trainer.device != name:
            yield (
                f"pools.{task}.platform={name}: {silent[0]} shares these devices. Set "
                f"trainer.device={name}, or actor_rollout_ref.hybrid_engine=False for devices of "
                "their own."
            )


def _order_problems(config: RunConfig, placement: Placement) -> Iterator[str]:
    platforms = known_platforms(placement)
    runs = Counter(platform for platform, _ in groupby(platforms))
    scattered = next((platform for platform, number in runs.items() if number > 1), None)
    if scattered is None:
        return
    every = [pool.platform for pool in placement.pools]
    ordered = sorted(placement.pools, key=lambda pool: every.index(pool.platform))
    groups = show_groups((*pool.tasks, *pool.unused_tasks) for pool in ordered)
    ratios = dict(
        zip(map(tuple, task_groups(config)), config.trainer.separated_node_ratios, strict=True)
    )
    shares = ",".join(f"{share:g}" for share in _in_order(ratios, ordered))
    yield (
        f"trainer.separated_node_tasks={show_groups(task_groups(config))}: pools of "
        f"{', '.join(platforms)} in this order: those of {scattered} must follow each other, as "
        f"libraries between vendors count on it. Set trainer.separated_node_tasks={groups} "
        f"trainer.separated_node_ratios=[{shares}]."
    )


def _in_order(ratios: dict[tuple[str, ...], float], pools: Sequence[Pool]) -> Iterator[float]:
    for pool in pools:
        tasks = {*pool.tasks, *pool.unused_tasks}
        yield next(ratio for group, ratio in ratios.items() if {*group} == tasks)


def _transport_problems(config: RunConfig, placement: Placement) -> Iterator[str]:
    wanted = config.pools.transport
    platforms = list(dict.fromkeys(known_platforms(placement)))
    if len(platforms) > 1 and wanted == "collective":
        yield (
            f"{_TRANSPORT}=collective: the pools have {' and '.join(platforms)}, which share no "
            f"library. Set {_TRANSPORT}=auto."
        )
    if _HOST in platforms and wanted == "flagcx":
        yield (
            f"{_TRANSPORT}=flagcx: FlagCX connects devices, and a pool is on the host "
            f"({_HOST}). Set {_TRANSPORT}=staged."
        )
