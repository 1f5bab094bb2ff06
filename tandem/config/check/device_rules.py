# SPDX-License-Identifier: Apache-2.0
"""What is wrong with how a run is spread over devices, one line each; whether those devices exist
is not asked here. What depends on the model's sizes is ``require_division``'s.

verl demands that batches divide by all devices. Here micro-batches are dealt to ranks, of any
number, so that it is enough that every rank gets a sequence (a replica of the rollout: a prompt).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from tandem.config.check.platform_rules import platform_problems
from tandem.config.derived.pools import (
    CRITIC,
    HALVES,
    REWARD_MODEL,
    ROUNDING,
    TASKS,
    Placement,
    Pool,
    models_beside,
    needed_tasks,
    place_run,
    place_sft,
    scorer_of,
    share_devices,
    show_groups,
    show_shares,
)
from tandem.config.derived.sizes import ModelSizes, division_problems
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

_ROLES = "actor_rollout_ref"
_TASKS_KEY = "trainer.separated_node_tasks"
_RATIOS_KEY = "trainer.separated_node_ratios"
_DEVICES_KEY = "trainer.n_gpus_per_node"
_MOST_DEVICES = 1024
"""Devices of a node that a remedy asks for at most."""


def run_device_problems(config: RunConfig) -> Iterator[str]:
    """Of ``tandem train``. Groups that make no sense hide the problems of what they would do."""
    problems = tuple(_group_problems(config)) or tuple(_empty_pool_problems(config))
    problems = problems or tuple(platform_problems(config))
    yield from problems
    if problems:
        return
    placement = place_run(config)
    for pool in placement.used_pools:
        yield from _run_layout_problems(config, pool)
    yield from _run_batch_problems(config, placement)


def sft_device_problems(config: SftConfig) -> Iterator[str]:
    """Of ``tandem sft``."""
    placement = place_sft(config)
    problems = tuple(_layout_problems(config.engine, placement.pools[0], section="engine"))
    yield from problems
    num_ranks = placement.layouts["actor-train"].data_parallel
    if not problems and config.data.train_batch_size < num_ranks:
        yield (
            f"data.train_batch_size={config.data.train_batch_size}: must give each of {num_ranks} "
            f"data-parallel ranks a row. Set data.train_batch_size={num_ranks} or fewer devices."
        )


def _group_problems(config: RunConfig) -> Iterator[str]:
    groups = config.trainer.separated_node_tasks
    ratios = config.trainer.separated_node_ratios
    if groups:
        yield from _task_problems(groups, needed_tasks(config))
    if groups or ratios:
        yield from _ratio_problems(groups, ratios)


def _task_problems(groups: Sequence[tuple[str, ...]], needed: Sequence[str]) -> Iterator[str]:
    key, tasks = f"{_TASKS_KEY}={show_groups(groups)}", list(chain.from_iterable(groups))
    if () in groups:
        yield f"{key}: a group is empty. Name its tasks, or take it out with its ratio."
    for task in tasks:
        if task not in TASKS or tasks.count(task) > 1:
            rule = "is named more than once" if task in TASKS else "is no task"
            yield f"{key}: {task!r} {rule}. Name each of {', '.join(TASKS)} once."
    for task in needed:
        if task not in tasks:
            where = ", which may be that of actor-train" if task != "actor-train" else ""
            yield f"{key}: {task} is missing, and this run needs it. Add it to a group{where}."


def _ratio_problems(groups: Sequence[tuple[str, ...]], ratios: Sequence[float]) -> Iterator[str]:
    key = f"{_RATIOS_KEY}={list(ratios)}"
    if not groups:
        yield (
            f"{key}: {_TASKS_KEY} is missing. Name there a group of tasks for each ratio, or set "
            f"{_RATIOS_KEY}=[]."
        )
    elif len(ratios) != len(groups):
        yield (
            f"{key}: must have one ratio for each of the {len(groups)} groups of "
            f"{_TASKS_KEY}. Write {len(groups)} numbers above 0 that add up to at most 1."
        )
    elif min(ratios) <= 0:
        yield f"{key}: must be positive. Raise the others, or take out their groups."
    elif sum(ratios) > 1 + ROUNDING:
        yield f"{key}: must add up to at most 1. Set {_RATIOS_KEY}={show_shares(ratios)}."


def _empty_pool_problems(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.separated_node_tasks:
        if not config.actor_rollout_ref.hybrid_engine and trainer.num_devices < len(HALVES):
            yield (
                f"{_ROLES}.hybrid_engine=False: must have a device to train and another to "
                f"generate, and trainer.nnodes * {_DEVICES_KEY} is 1. "
                f"Set {_DEVICES_KEY}=2 or {_ROLES}.hybrid_engine=True."
            )
        return
    ratios = trainer.separated_node_ratios
    for tasks, share in zip(
        trainer.separated_node_tasks, share_devices(ratios, trainer.num_devices), strict=True
    ):
        if share == 0:
            enough = _enough_devices(trainer)
            remedy = "Raise its ratio."
            if enough is not None:
                remedy = f"Set {_DEVICES_KEY}={enough}, or raise its ratio."
            yield (
                f"{_RATIOS_KEY}={list(ratios)}: gives {list(tasks)} none of {trainer.num_devices} "
                f"devices. {remedy}"
            )


def _enough_devices(trainer: TrainerConfig) -> int | None:
    """Devices per node from which on every group gets one; None if no node has so many."""
    for number in range(trainer.n_gpus_per_node, _MOST_DEVICES + 1):
        if 0 not in share_devices(trainer.separated_node_ratios, trainer.nnodes * number):
            return number
    return None


def _run_layout_problems(config: RunConfig, pool: Pool) -> Iterator[str]:
    roles = config.actor_rollout_ref
    if "actor-train" in pool.tasks or scorer_of(pool) == "logp":
        section = section_of("actor-train")
        yield from _layout_problems(roles.actor.fsdp_config, pool, section=section)
    if "ref_logp" in pool.tasks:
        yield from _layout_problems(roles.ref.fsdp_config, pool, section=section_of("ref_logp"))
    for name, layout in models_beside(config).items() if "actor-train" in pool.tasks else ():
        yield from _layout_problems(layout, pool, section=section_of(name))


def section_of(task: str) -> str:
    """Of the keys that lay out the weights of a task of ``tandem train``, or of a model beside."""
    if task in (CRITIC, REWARD_MODEL):
        return f"{task}.model.fsdp_config"
    return f"{_ROLES}.{'ref' if task == 'ref_logp' else 'actor'}.fsdp_config"


def _layout_problems(config: FsdpConfig, pool: Pool, *, section: str) -> Iterator[str]:
    """Of the ranks of one pool."""
    where = f"the {pool.num_devices} device(s) of {pool.name}"
    split, sequence = config.tensor_model_parallel_size, config.ulysses_sequence_parallel_size
    split_key = f"{section}.tensor_model_parallel_size"
    sequence_key = f"{section}.ulysses_sequence_parallel_size"
    if pool.num_devices % split:
        yield (
            f"{split_key}={split}: must divide {where}. "
            f"Set {split_key}={_largest_divisor(pool.num_devices, split)}."
        )
    elif pool.num_devices % (split * sequence):
        left = pool.num_devices // split
        times = f", times {split_key}={split}," if split > 1 else ""
        yield (
            f"{sequence_key}={sequence}: must{times} divide {where}. "
            f"Set {sequence_key}={_largest_divisor(left, sequence)}."
        )
    elif config.fsdp_size == 0 or (
        config.fsdp_size > 0 and pool.num_devices // split % config.fsdp_size
    ):
        key = f"{section}.fsdp_size"
        ranks = f"{where} / {split_key}={split}" if split > 1 else where
        yield f"{key}={config.fsdp_size}: must divide {ranks}, or be -1 for all. Set {key}=-1."


def require_division(
    config: RunConfig | SftConfig, placement: Placement, *, models: Mapping[str, ModelSizes | None]
) -> None:
    """Raise UserError if a model of our own decoder cannot be divided as its ranks are.

    Args:
        models: by the names in ``placement.layouts``; nothing is said of a model that is not known.
    """
    for task, layout in placement.layouts.items():
        sizes = models.get(task)
        if sizes is not None:
            section = section_of(task) if isinstance(config, RunConfig) else "engine"
            for problem in division_problems(
                sizes.num_heads,
                sizes.num_kv_heads,
                inner=sizes.inner,
                tensor=layout.tensor_parallel,
                sequence=layout.sequence_parallel,
                section=section,
            ):
                raise UserError(problem)


def _run_batch_problems(config: RunConfig, placement: Placement) -> Iterator[str]:
    layouts = placement.layouts
    n = config.actor_rollout_ref.rollout.n
    mini_batches = {
        "actor-train": (f"{_ROLES}.actor", config.actor_rollout_ref.actor.ppo_mini_batch_size),
        CRITIC: ("critic", config.critic.ppo_mini_batch_size),
    }
    for task, (section, size) in mini_batches.items():
        if task in layouts and size * n < layouts[task].data_parallel:
            num_ranks = layouts[task].data_parallel
            yield (
                f"{section}.ppo_mini_batch_size={size}: times {_ROLES}.rollout.n={n} must give "
                f"each of {num_ranks} data-parallel ranks a sequence. "
                f"{_larger_mini_batch(config, -(-num_ranks // n), section=section)}"
            )
    for task in ("logp", "ref_logp", CRITIC, REWARD_MODEL):
        if task in layouts and config.sequences_per_step < layouts[task].data_parallel:
            yield _larger_batch(config, -(-layouts[task].data_parallel // n), task=task)
    if config.data.train_batch_size < layouts["generate"].data_parallel:
        yield _larger_batch(config, layouts["generate"].data_parallel, task="generate")


def _larger_mini_batch(config: RunConfig, num_prompts: int, *, section: str) -> str:
    batch = config.data.train_batch_size
    fitting = [size for size in range(num_prompts, batch + 1) if batch % size == 0]
    if fitting:
        return f"Set {section}.ppo_mini_batch_size={fitting[0]} or fewer devices."
    return (
        f"Set data.train_batch_size={num_prompts} and {section}.ppo_mini_batch_size="
        f"{num_prompts}, or fewer devices."
    )


def _larger_batch(config: RunConfig, num_prompts: int, *, task: str) -> str:
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = -(-num_prompts // mini) * mini
    return (
        f"data.train_batch_size={config.data.train_batch_size}: must give each data-parallel rank "
        f"of {task} work, which takes {num_prompts} prompts. "
        f"Set data.train_batch_size={batch} or fewer devices."
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if number % size == 0)
