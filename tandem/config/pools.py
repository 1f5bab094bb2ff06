# SPDX-License-Identifier: Apache-2.0
"""Which devices do which tasks: one pool for everything, or dots.rl's groups with their shares.

Only the arithmetic of the plan; no pool but the first kind is built yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from tandem.config.run import RunConfig
from tandem.config.trainer import TrainerConfig

TASKS = ("actor-train", "logp", "ref_logp", "generate")
_HALVES = (("actor-train", "logp", "ref_logp"), ("generate",))
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Pool:
    """Tasks that share devices."""

    tasks: tuple[str, ...]
    devices: int


def plan_pools(config: RunConfig) -> tuple[Pool, ...]:
    """The pools that ``hybrid_engine`` and ``separated_node_*`` ask for; one may get no device."""
    trainer = config.trainer
    groups, ratios = trainer.separated_node_tasks, trainer.separated_node_ratios
    if not groups:
        if config.actor_rollout_ref.hybrid_engine:
            return (Pool(TASKS, trainer.num_devices),)
        groups, ratios = _HALVES, (0.5, 0.5)
    shares = share_devices(ratios, trainer.num_devices)
    return tuple(Pool(tasks, share) for tasks, share in zip(groups, shares, strict=True))


def share_devices(ratios: Sequence[float], num_devices: int) -> tuple[int, ...]:
    """Whole devices by largest remainder; together ``floor(sum(ratios) * num_devices)``.

    Example:
        >>> share_devices((0.5, 0.25, 0.25), 8)
        (4, 2, 2)
    """
    exact = [ratio * num_devices for ratio in ratios]
    shares = [math.floor(value + _ROUNDING) for value in exact]
    left = math.floor(sum(exact) + _ROUNDING) - sum(shares)
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[:left]:
        shares[index] += 1
    return tuple(shares)


def group_problems(trainer: TrainerConfig) -> Iterator[str]:
    """What is wrong with ``separated_node_tasks`` and ``separated_node_ratios``, a line each."""
    groups, ratios = trainer.separated_node_tasks, trainer.separated_node_ratios
    if groups:
        yield from _task_problems(groups)
    if groups or ratios:
        yield from _ratio_problems(groups, ratios)


def _task_problems(groups: Sequence[tuple[str, ...]]) -> Iterator[str]:
    tasks = list(chain.from_iterable(groups))
    key = "trainer.separated_node_tasks"
    for task in tasks:
        if task not in TASKS or tasks.count(task) > 1:
            rule = "is named more than once" if task in TASKS else "is no task"
            yield f"{key}={tasks}: {task!r} {rule}. Name each of {', '.join(TASKS)} once."
    for task in ("actor-train", "generate"):
        if task not in tasks:
            yield f"{key}={tasks}: {task} is missing. Add it to a group."


def _ratio_problems(groups: Sequence[tuple[str, ...]], ratios: Sequence[float]) -> Iterator[str]:
    key = f"trainer.separated_node_ratios={list(ratios)}"
    if len(ratios) != len(groups):
        yield (
            f"{key}: must have one ratio for each of the {len(groups)} groups of "
            f"trainer.separated_node_tasks. Write {len(groups)} numbers."
        )
    elif min(ratios) <= 0 or sum(ratios) > 1 + _ROUNDING:
        yield f"{key}: must be positive and add up to at most 1. Lower them."
