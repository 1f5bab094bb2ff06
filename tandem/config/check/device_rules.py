# SPDX-License-Identifier: Apache-2.0
"""Rules on how a run is spread over devices. Whether the devices exist is not checked here.

verl requires batch sizes to be multiples of the number of devices. tandem deals any number of
micro-batches to ranks: a rank only needs one sequence, and a replica of the rollout one prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from tandem.config.check.expert_rules import (
    expert_division_error,
    expert_parallel_errors,
    require_built,
    rollout_division_errors,
)
from tandem.config.check.mcore_rules import mcore_errors
from tandem.config.check.platform_rules import platform_errors
from tandem.config.check.stage_rules import stage_errors
from tandem.config.derived.pools import (
    CRITIC,
    REWARD_MODEL,
    TASKS,
    Placement,
    Pool,
    auxiliary_layouts,
    needed_tasks,
    place_run,
    place_sft,
    scorer_of,
    section_of,
)
from tandem.config.derived.sizes import ModelSizes, division_errors
from tandem.config.derived.trained_model import trained_model
from tandem.config.parse.shares import ROUNDING, share_devices, show_shares
from tandem.config.schema.families import NATIVE_FAMILIES
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.megatron import in_words_of_megatron
from tandem.config.schema.pools import HALVES
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

_ROLES = "actor_rollout_ref"
_TASKS_KEY = "trainer.separated_node_tasks"
_RATIOS_KEY = "trainer.separated_node_ratios"
_DEVICES_KEY = "trainer.n_gpus_per_node"
_BATCH_KEY = "data.train_batch_size"
_MAX_DEVICES = 1024
"""The largest number of devices per node that a remedy suggests."""


def run_device_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield the errors of ``tandem train``. Errors in groups hide errors that follow from them."""
    errors = tuple(_group_errors(config)) or tuple(_empty_pool_errors(config))
    errors = errors or tuple(platform_errors(config))
    yield from errors
    if errors:
        return
    placement = place_run(config)
    for pool in placement.used_pools:
        for error in _run_layout_errors(config, pool):
            yield _as_written(error, config)
    yield from rollout_division_errors(config, placement)
    yield from _run_batch_errors(config, placement)


def sft_device_errors(config: SftConfig) -> Iterator[UserError]:
    """Yield the errors of ``tandem sft``."""
    placement = place_sft(config)
    errors = tuple(_layout_errors(config.engine, placement.pools[0], section="engine"))
    yield from errors
    num_ranks = placement.layouts["actor-train"].data_parallel
    if not errors and config.data.train_batch_size < num_ranks:
        yield UserError(
            _BATCH_KEY,
            config.data.train_batch_size,
            rule=f"must give each of {num_ranks} data-parallel ranks a row",
            remedy=f"Set {_BATCH_KEY}={num_ranks} or fewer devices.",
        )


def _group_errors(config: RunConfig) -> Iterator[UserError]:
    groups = config.trainer.separated_node_tasks
    ratios = config.trainer.separated_node_ratios
    if groups:
        yield from _task_errors(groups, needed_tasks(config))
    if groups or ratios:
        yield from _ratio_errors(groups, ratios)


def _task_errors(groups: Sequence[tuple[str, ...]], needed: Sequence[str]) -> Iterator[UserError]:
    tasks = list(chain.from_iterable(groups))
    if () in groups:
        yield UserError(
            _TASKS_KEY,
            groups,
            rule="a group is empty",
            remedy="Name its tasks, or remove it and its ratio.",
        )
    for task in tasks:
        if task not in TASKS or tasks.count(task) > 1:
            rule = "is named more than once" if task in TASKS else "is not a task"
            yield UserError(
                _TASKS_KEY,
                groups,
                rule=f"{task!r} {rule}",
                remedy=f"Name each of {', '.join(TASKS)} once.",
            )
    for task in needed:
        if task not in tasks:
            where = ", for example that of actor-train" if task != "actor-train" else ""
            yield UserError(
                _TASKS_KEY,
                groups,
                rule=f"{task} is missing, and this run needs it",
                remedy=f"Add it to a group{where}.",
            )


def _ratio_errors(
    groups: Sequence[tuple[str, ...]], ratios: Sequence[float]
) -> Iterator[UserError]:
    if not groups:
        yield UserError(
            _RATIOS_KEY,
            ratios,
            rule=f"{_TASKS_KEY} is missing",
            remedy=f"Name a group of tasks there for each ratio, or set {_RATIOS_KEY}=[].",
        )
    elif len(ratios) != len(groups):
        yield UserError(
            _RATIOS_KEY,
            ratios,
            rule=f"must have one ratio for each of the {len(groups)} groups of {_TASKS_KEY}",
            remedy=f"Write {len(groups)} numbers above 0 that add up to at most 1.",
        )
    elif min(ratios) <= 0:
        yield UserError(
            _RATIOS_KEY,
            ratios,
            rule="must be positive",
            remedy="Raise the ratios that are not, or remove their groups.",
        )
    elif sum(ratios) > 1 + ROUNDING:
        yield UserError(
            _RATIOS_KEY,
            ratios,
            rule="must add up to at most 1",
            remedy=f"Set {_RATIOS_KEY}={show_shares(ratios)}.",
        )


def _empty_pool_errors(config: RunConfig) -> Iterator[UserError]:
    trainer = config.trainer
    if not trainer.separated_node_tasks:
        if not config.actor_rollout_ref.hybrid_engine and trainer.num_devices < len(HALVES):
            yield UserError(
                f"{_ROLES}.hybrid_engine",
                False,
                rule="needs a device to train and another to generate, but trainer.nnodes * "
                f"{_DEVICES_KEY} is 1",
                remedy=f"Set {_DEVICES_KEY}=2 or {_ROLES}.hybrid_engine=True.",
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
            yield UserError(
                _RATIOS_KEY,
                ratios,
                rule=f"gives {list(tasks)} none of {trainer.num_devices} devices",
                remedy=remedy,
            )


def _enough_devices(trainer: TrainerConfig) -> int | None:
    """Return the smallest number of devices per node that gives every group one, or None."""
    for number in range(trainer.n_gpus_per_node, _MAX_DEVICES + 1):
        if 0 not in share_devices(trainer.separated_node_ratios, trainer.nnodes * number):
            return number
    return None


def _run_layout_errors(config: RunConfig, pool: Pool) -> Iterator[UserError]:
    roles = config.actor_rollout_ref
    if "actor-train" in pool.tasks or scorer_of(pool) == "logp":
        section = section_of("actor-train")
        yield from _layout_errors(roles.actor.fsdp_config, pool, section=section)
    if "ref_logp" in pool.tasks:
        yield from _layout_errors(roles.ref.fsdp_config, pool, section=section_of("ref_logp"))
    for name, layout in auxiliary_layouts(config).items() if "actor-train" in pool.tasks else ():
        yield from _layout_errors(layout, pool, section=section_of(name))


def _layout_errors(config: FsdpConfig, pool: Pool, *, section: str) -> Iterator[UserError]:
    devices = f"the {pool.num_devices} device(s) of {pool.name}"
    stages, number = config.pipeline_model_parallel_size, pool.num_devices
    if number % stages:
        key = f"{section}.pipeline_model_parallel_size"
        yield UserError(
            key,
            stages,
            rule=f"must divide {devices}",
            remedy=f"Set {key}={_largest_divisor(number, stages)}.",
        )
        return
    if stages > 1:
        number //= stages
        devices = f"the {number} device(s) of each of {stages} stages of {pool.name}"
    split, sequence = config.tensor_model_parallel_size, config.ulysses_sequence_parallel_size
    split_key = f"{section}.tensor_model_parallel_size"
    sequence_key = f"{section}.ulysses_sequence_parallel_size"
    if number % split:
        yield UserError(
            split_key,
            split,
            rule=f"must divide {devices}",
            remedy=f"Set {split_key}={_largest_divisor(number, split)}.",
        )
    elif number % (split * sequence):
        left = number // split
        times = f", times {split_key}={split}," if split > 1 else ""
        yield UserError(
            sequence_key,
            sequence,
            rule=f"must{times} divide {devices}",
            remedy=f"Set {sequence_key}={_largest_divisor(left, sequence)}.",
        )
    elif number % config.num_expert_devices:
        largest = _largest_divisor(number, config.num_expert_devices)
        yield expert_division_error(config, devices, section=section, largest=largest)
    elif config.fsdp_size == 0 or (
        0 < config.fsdp_size < number // split and number // split % config.fsdp_size
    ):
        key = f"{section}.fsdp_size"
        ranks = f"{devices} / {split_key}={split}" if split > 1 else devices
        yield UserError(
            key,
            config.fsdp_size,
            rule=f"must divide {ranks}, or be -1 for all",
            remedy=f"Set {key}=-1.",
        )


def require_division(
    config: RunConfig | SftConfig, placement: Placement, *, models: Mapping[str, ModelSizes | None]
) -> None:
    """Raise UserError if a model of the native decoder cannot be divided over its ranks, or if what
    is asked for is not built for models with experts.

    Args:
        models: the sizes by the names in ``placement.layouts``; None for an unknown model, which is
            not checked.
    """
    of_task = trained_model(config).of_task
    require_built(config, models.get("actor-train"))
    for task, layout in placement.layouts.items():
        sizes = models.get(task)
        if sizes is None:
            continue
        model = of_task.get(task, of_task["actor-train"])
        section = model.section
        divisions = division_errors(
            sizes.num_heads,
            sizes.num_kv_heads,
            inner=sizes.inner,
            tensor=layout.tensor_parallel,
            sequence=layout.sequence_parallel,
            section=section,
        )
        for error in chain(
            divisions,
            expert_parallel_errors(layout, sizes, model=model),
            stage_errors(layout, sizes, section=section),
            mcore_errors(layout, sizes, model=model),
        ):
            raise _as_written(error, config)


def require_whole_layers(
    config: RunConfig | SftConfig, placement: Placement, *, family: str
) -> None:
    """Raise UserError if a layer of a model that transformers computes is divided over ranks.

    Its parameters can only be sharded (FSDP2).

    Args:
        family: the ``model_type`` of the policy.
    """
    if family in NATIVE_FAMILIES:
        return
    of_task = trained_model(config).of_task
    for task, layout in placement.layouts.items():
        section = of_task.get(task, of_task["actor-train"]).section
        sizes = {
            "tensor_model_parallel_size": layout.tensor_parallel,
            "ulysses_sequence_parallel_size": layout.sequence_parallel,
            "expert_model_parallel_size": layout.expert_parallel,
            "pipeline_model_parallel_size": layout.pipeline_parallel,
        }
        for name, size in sizes.items():
            if size > 1 and task not in (CRITIC, REWARD_MODEL):
                rule = f"transformers computes models of type {family!r}, and divides no layer"
                remedy = f"Use 1, or a model of {', '.join(NATIVE_FAMILIES)}."
                error = UserError(f"{section}.{name}", size, rule=rule, remedy=remedy)
                raise _as_written(error, config)
        if layout.groups_heads:
            rule = f"transformers computes models of type {family!r}"
            key = f"{section}.backend"
            error = UserError(key, "mcore", rule=rule, remedy=f"Set {key}=native.")
            raise _as_written(error, config)


def mcore_key(config: RunConfig | SftConfig, placement: Placement) -> str | None:
    """Return the key by which a model asks for megatron-core; None if no model does."""
    of_task = trained_model(config).of_task
    for task, layout in placement.layouts.items():
        if layout.groups_heads:
            key = f"{of_task.get(task, of_task['actor-train']).section}.backend"
            return _as_written(UserError(key), config).key
    return None


def _as_written(error: UserError, config: RunConfig | SftConfig) -> UserError:
    """Return an error about a layout with the names of keys that the strategy has."""
    if isinstance(config, SftConfig) or config.actor_rollout_ref.actor.strategy != "megatron":
        return error
    key, rule, remedy = map(in_words_of_megatron, (error.key, error.rule, error.remedy))
    return UserError(key, error.value, rule=rule, remedy=remedy)


def _run_batch_errors(config: RunConfig, placement: Placement) -> Iterator[UserError]:
    layouts = placement.layouts
    n = config.actor_rollout_ref.rollout.n
    mini_batches = {
        "actor-train": (f"{_ROLES}.actor", config.actor_rollout_ref.actor.ppo_mini_batch_size),
        CRITIC: ("critic", config.critic.ppo_mini_batch_size),
    }
    for task, (section, size) in mini_batches.items():
        if task in layouts and size * n < layouts[task].data_parallel:
            num_ranks = layouts[task].data_parallel
            yield UserError(
                f"{section}.ppo_mini_batch_size",
                size,
                rule=f"times {_ROLES}.rollout.n={n} must give each of {num_ranks} data-parallel "
                "ranks a sequence",
                remedy=_larger_mini_batch(config, -(-num_ranks // n), section=section),
            )
    for task in ("generate", "logp", "ref_logp", CRITIC, REWARD_MODEL):
        if task in layouts and config.sequences_per_step < layouts[task].data_parallel:
            yield _larger_batch(config, -(-layouts[task].data_parallel // n), task=task)


def _larger_mini_batch(config: RunConfig, num_prompts: int, *, section: str) -> str:
    batch = config.data.train_batch_size
    fitting = [size for size in range(num_prompts, batch + 1) if batch % size == 0]
    if fitting:
        return f"Set {section}.ppo_mini_batch_size={fitting[0]} or fewer devices."
    return (
        f"Set {_BATCH_KEY}={num_prompts} and {section}.ppo_mini_batch_size="
        f"{num_prompts}, or fewer devices."
    )


def _larger_batch(config: RunConfig, num_prompts: int, *, task: str) -> UserError:
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    batch = -(-num_prompts // mini) * mini
    return UserError(
        _BATCH_KEY,
        config.data.train_batch_size,
        rule=f"must give each data-parallel rank of {task} work: {num_prompts} prompts or more",
        remedy=f"Set {_BATCH_KEY}={batch} or fewer devices.",
    )


def _largest_divisor(number: int, at_most: int) -> int:
    return max(size for size in range(1, at_most + 1) if number % size == 0)
