# SPDX-License-Identifier: Apache-2.0
"""Rules on the platforms that pools name, and the routes of weights between them.

Names are compared as text. Whether a platform exists is not checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, groupby

from tandem.config.derived.pools import Placement, Pool, named_platforms, place_run, task_groups
from tandem.config.parse.shares import show_groups
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_HOST = "cpu"
_UNKNOWN = "auto"
_TRANSPORT = "pools.transport"
_TIME_SHARED = ("actor-train", "generate")


def platform_key(pool: Pool, config: RunConfig | SftConfig) -> str:
    """Return the key that names the platform of a pool."""
    keys: list[str] = []
    if isinstance(config, RunConfig):
        named = config.pools.named
        keys = [f"pools.{task}.platform" for task in pool.tasks if task in named]
    return next(iter(keys), "trainer.device")


def platform_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors in the platforms of ``tandem train``, whose groups of tasks are correct."""
    errors = [error for tasks in task_groups(config) for error in _group_errors(config, tasks)]
    yield from errors
    if not errors:
        yield from placement_errors(config, place_run(config))


def placement_errors(config: RunConfig, placement: Placement) -> Iterator[UserError]:
    """Yield the errors of pools whose platforms ``placement`` names.

    A platform that is still ``auto`` could be any of the others and is not checked.
    """
    yield from _order_errors(config, placement)
    yield from _transport_errors(config, placement)


def known_platforms(placement: Placement) -> list[str]:
    """Return the platforms of the used pools in order, without those that are still ``auto``."""
    return [pool.platform for pool in placement.used_pools if pool.platform != _UNKNOWN]


def weight_routes(config: RunConfig, placement: Placement) -> dict[str, str]:
    """Return the route of weights between each two pools, as far as the plan can know it."""
    pools = [pool for pool in placement.used_pools if {*pool.tasks} - {"ref_logp"}]
    return {
        f"{one.name} -> {other.name}": _route(one, other, requested=config.pools.transport)
        for one, other in combinations(sorted(pools, key=_is_receiver), 2)
        if "actor-train" in one.tasks
    }


def _is_receiver(pool: Pool) -> bool:
    return "actor-train" not in pool.tasks


def _route(one: Pool, other: Pool, *, requested: str) -> str:
    if one.platform == other.platform:
        return "collective (one platform)" if requested == "auto" else f"{requested} (as requested)"
    if requested not in ("auto", "staged"):
        return f"{requested} (as requested): from {one.platform} to {other.platform}"
    if requested == "auto" and _UNKNOWN in (one.platform, other.platform):
        return "collective if auto finds the platform of the other pool, else staged"
    reason = "as requested" if requested == "staged" else "two platforms, not both with FlagCX"
    crossing = f"from {one.platform} to {other.platform} once, then collective inside"
    return f"staged ({reason}): {crossing}"


def _group_errors(config: RunConfig, tasks: Sequence[str]) -> Iterator[UserError]:
    """Yield the errors of tasks that share devices."""
    named = {task: name for task, name in named_platforms(config).items() if task in tasks}
    if len(set(named.values())) > 1:
        listed = ", ".join(f"pools.{task}.platform={name}" for task, name in named.items())
        yield UserError(
            listed,
            rule="these tasks share devices, which must be of one platform",
            remedy="Name one platform, or give the tasks pools of their own with "
            "trainer.separated_node_tasks.",
        )
    elif named and all(task in tasks for task in _TIME_SHARED):
        task, name = next(iter(named.items()))
        silent = [task for task in _TIME_SHARED if task not in named]
        if silent and config.trainer.device != name:
            yield UserError(
                f"pools.{task}.platform",
                name,
                rule=f"{silent[0]} shares these devices, but not their platform",
                remedy=f"Set trainer.device={name}, or actor_rollout_ref.hybrid_engine=False for "
                "devices of their own.",
            )


def _order_errors(config: RunConfig, placement: Placement) -> Iterator[UserError]:
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
    yield UserError(
        "trainer.separated_node_tasks",
        task_groups(config),
        rule=f"pools of {', '.join(platforms)} in this order: those of {scattered} must follow "
        "each other, because communication libraries between vendors rely on it",
        remedy=f"Set trainer.separated_node_tasks={groups} "
        f"trainer.separated_node_ratios=[{shares}].",
    )


def _in_order(ratios: dict[tuple[str, ...], float], pools: Sequence[Pool]) -> Iterator[float]:
    for pool in pools:
        tasks = {*pool.tasks, *pool.unused_tasks}
        yield next(ratio for group, ratio in ratios.items() if {*group} == tasks)


def _transport_errors(config: RunConfig, placement: Placement) -> Iterator[UserError]:
    transport = config.pools.transport
    platforms = list(dict.fromkeys(known_platforms(placement)))
    if len(platforms) > 1 and transport == "collective":
        yield UserError(
            _TRANSPORT,
            transport,
            rule=f"the pools have {' and '.join(platforms)}, which have no library in common",
            remedy=f"Set {_TRANSPORT}=auto.",
        )
    if _HOST in platforms and transport == "flagcx":
        yield UserError(
            _TRANSPORT,
            transport,
            rule=f"FlagCX connects devices, and a pool is on the host ({_HOST})",
            remedy=f"Set {_TRANSPORT}=staged.",
        )
