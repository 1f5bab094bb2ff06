# SPDX-License-Identifier: Apache-2.0
"""What a run would do: steps, batches, pools, keys in vain. Starts nothing, reads no file.

Of ``tandem train`` and of ``tandem sft``, whose steps are one optimizer step each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.config.check.ignored_keys import key_effects, keys_without_effect
from tandem.config.check.platform_rules import platform_key, weight_ways
from tandem.config.check.rules import check_run, check_sft, unbuilt_run, unbuilt_sft
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, Placement, Pool, place_run, place_sft
from tandem.config.derived.schedule import Schedule, schedule_run, schedule_sft
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import LoadedConfig
from tandem.config.plan.memory import NONE_BESIDE, MemoryPlan, plan_memory
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

_UNUSED = {
    "logp": "the update is strictly on-policy or in bypass_mode",
    "ref_logp": "no KL asks for a reference",
}
"""Why nothing in a run asks for a task."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one run. What depends on rows that could not be counted is None.

    Attributes:
        num_train_rows, num_val_rows: before filtering.
        steps_per_epoch, total_training_steps, validation_steps: as ``Schedule`` has them.
        sequences_per_step: (generated and) trained on in one training step.
        optimizer_steps_per_step: mini-batches times passes.
        placement: which tasks share which devices.
        memory: of one accelerator of each pool, None if the model's sizes are not known.
        key_effects: every key that was set, as it was spelt -> what it does.
        keys_without_effect: those set in vain -> why.
        unknown_keys: let pass because of their ``+``.
        warnings: one line each.
        config: the whole resolved configuration.
    """

    num_train_rows: int | None
    num_val_rows: int | None
    steps_per_epoch: int | None
    total_training_steps: int | None
    validation_steps: tuple[int, ...] | None
    sequences_per_step: int
    optimizer_steps_per_step: int
    placement: Placement
    memory: Mapping[str, MemoryPlan] | None
    key_effects: Mapping[str, str]
    keys_without_effect: Mapping[str, str]
    unknown_keys: tuple[str, ...]
    warnings: tuple[str, ...]
    config: RunConfig | SftConfig

    @property
    def weights(self) -> Mapping[str, str]:
        """How weights travel between pools: "one -> other" -> the way, and why."""
        config = self.config
        return {} if isinstance(config, SftConfig) else weight_ways(config, self.placement)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        steps = self.validation_steps
        return {
            "total_training_steps": self.total_training_steps,
            "steps_per_epoch": self.steps_per_epoch,
            "sequences_per_step": self.sequences_per_step,
            "optimizer_steps_per_step": self.optimizer_steps_per_step,
            "validation_steps": None if steps is None else list(steps),
            "num_train_rows": self.num_train_rows,
            "num_val_rows": self.num_val_rows,
            "pools": [self._pool_dict(pool) for pool in self.placement.pools],
            "weights": dict(self.weights),
            "key_effects": dict(self.key_effects),
            "keys_without_effect": dict(self.keys_without_effect),
            "unknown_keys": list(self.unknown_keys),
            "warnings": list(self.warnings),
            "config": self.config.model_dump(mode="json"),
        }

    def tasks_of(self, pool: Pool) -> tuple[str, ...]:
        """Those of the pool, and the critic and the reward model where they are."""
        beside = (CRITIC, REWARD_MODEL) if "actor-train" in pool.tasks else ()
        return (*pool.tasks, *(name for name in beside if name in self.placement.layouts))

    def _pool_dict(self, pool: Pool) -> dict[str, Any]:
        layouts = self.placement.layouts
        memory = (self.memory or {}).get(pool.name)
        return {
            "tasks": list(pool.tasks),
            "unused_tasks": list(pool.unused_tasks),
            "devices": pool.num_devices,
            "platform": pool.platform,
            "nodes": [
                {"node": run.node, "first": run.first, "last": run.last}
                for run in self.placement.node_ranges(pool)
            ],
            "data_parallel": {task: layouts[task].data_parallel for task in self.tasks_of(pool)},
            "memory_gib": None if memory is None else memory.to_gib(),
        }


def make_plan(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
    *,
    num_train_rows: int | None = None,
    num_val_rows: int | None = None,
    sizes: ModelSizes | None = None,
    beside: Mapping[str, ModelSizes] = NONE_BESIDE,
    warnings: Sequence[str] = (),
) -> Plan:
    """Plan a run of ``tandem train`` or ``tandem sft``, as the configuration's type says.

    Args:
        num_train_rows, num_val_rows: rows of the files, None where they could not be counted.
        sizes: of the model, None if they could not be read; ``beside``: see ``plan_memory``.
        warnings: what the caller found out, put first.

    Raises:
        UserError: keys that do not fit each other, or too few rows for one batch.
    """
    config = loaded.config
    train_rows = _taken(num_train_rows, config.data.train_max_samples)
    known = (
        _known_of_sft(config, train_rows)
        if isinstance(config, SftConfig)
        else _known_of_run(config, train_rows)
    )
    schedule = known.schedule
    return Plan(
        num_train_rows=train_rows,
        num_val_rows=_taken(num_val_rows, config.data.val_max_samples),
        steps_per_epoch=schedule.steps_per_epoch if schedule else None,
        total_training_steps=schedule.total_training_steps if schedule else None,
        validation_steps=schedule.validation_steps if schedule else None,
        sequences_per_step=known.sequences_per_step,
        optimizer_steps_per_step=known.optimizer_steps_per_step,
        placement=known.placement,
        memory=None if sizes is None else plan_memory(config, sizes, beside=beside),
        key_effects=key_effects(loaded),
        keys_without_effect=keys_without_effect(loaded),
        unknown_keys=loaded.unknown_keys,
        warnings=(*warnings, *loaded.warnings, *known.warnings),
        config=config,
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """What the two commands find out each in its way."""

    schedule: Schedule | None
    sequences_per_step: int
    optimizer_steps_per_step: int
    placement: Placement
    warnings: tuple[str, ...]


def _known_of_run(config: RunConfig, num_rows: int | None) -> _Known:
    check_run(config)
    placement = place_run(config)
    schedule = None if num_rows is None else schedule_run(config, num_rows)
    warnings = (
        *(f"train would refuse: {line}" for line in unbuilt_run(config)),
        *_planners_cautions(config, schedule),
        *_device_cautions(config, placement),
        *cautions(config),
    )
    return _Known(
        schedule, config.sequences_per_step, config.optimizer_steps_per_step, placement, warnings
    )


def _known_of_sft(config: SftConfig, num_rows: int | None) -> _Known:
    check_sft(config)
    placement = place_sft(config)
    schedule = None if num_rows is None else schedule_sft(config, num_rows)
    warnings = (
        *(f"sft would refuse: {line}" for line in unbuilt_sft(config)),
        *_device_cautions(config, placement),
    )
    return _Known(schedule, config.data.train_batch_size, 1, placement, warnings)


def _taken(num_rows: int | None, max_samples: int) -> int | None:
    """Rows that ``*_max_samples`` leaves; -1 and 0 leave all."""
    return num_rows if num_rows is None or max_samples <= 0 else min(num_rows, max_samples)


def _pool_cautions(config: RunConfig, placement: Placement) -> Iterator[str]:
    trainer = config.trainer
    if not config.actor_rollout_ref.hybrid_engine and not trainer.separated_node_tasks:
        yield (
            "actor_rollout_ref.hybrid_engine=False without trainer.separated_node_tasks: "
            "half of the devices train, half generate"
        )
    for pool in placement.pools:
        if not pool.tasks:
            reasons = " and ".join(_UNUSED[task] for task in pool.unused_tasks)
            yield f"pool {pool.name}: its {pool.num_devices} device(s) stay idle, as {reasons}"
    idle = placement.num_devices - sum(pool.num_devices for pool in placement.pools)
    if idle > 0:
        yield (
            f"trainer.separated_node_ratios: {idle} of {placement.num_devices} devices stay idle"
        )
    experts = config.actor_rollout_ref.actor.megatron.expert_model_parallel_size
    training = placement.pool_of("actor-train")
    if experts > training.num_devices:
        yield (
            f"actor_rollout_ref.actor.megatron.expert_model_parallel_size={experts}: exceeds the "
            f"{training.num_devices} devices of the training pool"
        )


def _planners_cautions(config: RunConfig, schedule: Schedule | None) -> Iterator[str]:
    """What the plan does not know and the run will."""
    if schedule is not None and config.data.filter_overlong_prompts:
        yield (
            "data.filter_overlong_prompts=True: steps are counted before overlong prompts are "
            "dropped; there may be fewer"
        )


def _device_cautions(config: RunConfig | SftConfig, placement: Placement) -> Iterator[str]:
    asked = {platform_key(pool, config): pool.platform for pool in placement.used_pools}
    for key, platform in asked.items():
        if platform not in ("auto", "cpu"):
            yield (
                f"{key}={platform}: not looked for by the plan; where it is not available, the "
                "run ends before it starts"
            )


def cautions(config: RunConfig) -> Iterator[str]:
    """What is legal and still deserves a look, one line each."""
    yield from _pool_cautions(config, place_run(config))
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    val_kwargs = rollout.val_kwargs
    if rollout.n == 1 and config.algorithm.estimator.prefers_groups:
        yield (
            "actor_rollout_ref.rollout.n=1: with one sample a prompt grpo has no baseline and the "
            "advantage is the reward itself; groups of 5 to 16 are usual"
        )
    if val_kwargs.n > 1 and not val_kwargs.do_sample:
        yield (
            f"actor_rollout_ref.rollout.val_kwargs.n={val_kwargs.n}: all samples are the same, as "
            "val_kwargs.do_sample=False is greedy"
        )
    if trainer.critic_warmup > 1 and not config.uses_critic:
        yield (
            f"trainer.critic_warmup={trainer.critic_warmup}: there is no critic to warm up, and "
            "nothing is learned before that step"
        )
