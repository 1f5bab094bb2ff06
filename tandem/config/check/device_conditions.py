# SPDX-License-Identifier: Apache-2.0
"""Which keys have no effect for want of a second device, and why: tables as in ``switches``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.config.check.device_rules import run_device_problems
from tandem.config.check.read_conditions import Condition
from tandem.config.derived.pools import Placement, needed_tasks, place_run, place_sft
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

_ACTOR = "actor_rollout_ref.actor.fsdp_config"
_REF = "actor_rollout_ref.ref.fsdp_config"
_ROLLOUT = "actor_rollout_ref.rollout"
_CRITIC = "critic.model.fsdp_config"
_REWARD_MODEL = "reward_model.model.fsdp_config"
_SHARDING = ("fsdp_size", "reshard_after_forward", "forward_prefetch")


def _placement(config: RunConfig | SftConfig) -> Placement | None:
    """None for a run that cannot be placed: its mistakes are said elsewhere."""
    if isinstance(config, SftConfig):
        return place_sft(config)
    return None if any(run_device_problems(config)) else place_run(config)


def _is_one_process(config: RunConfig | SftConfig) -> bool:
    placement = _placement(config)
    return placement is not None and placement.is_one_process


def _is_sharded_by_one(config: RunConfig | SftConfig, tasks: tuple[str, ...]) -> bool:
    """No pool with one of the tasks has a second device."""
    placement = _placement(config)
    return placement is not None and all(
        layout.num_ranks == 1 for task, layout in placement.layouts.items() if task in tasks
    )


def _deals_to_one(config: RunConfig | SftConfig) -> bool:
    """Every micro-batch goes to all ranks of its pool."""
    placement = _placement(config)
    return placement is not None and all(
        layout.data_parallel == 1
        for task, layout in placement.layouts.items()
        if task != "generate"
    )


def _is_not_done(config: RunConfig, *, task: str) -> bool:
    return task not in needed_tasks(config)


def _layout_conditions(
    section: str, layout: Callable[[Any], FsdpConfig], *, tasks: tuple[str, ...]
) -> tuple[Condition, ...]:
    return (
        Condition(
            tuple(f"{section}.{key}" for key in _SHARDING),
            lambda c: _is_sharded_by_one(c, tasks),
            "one device holds these weights: there is nothing to shard",
        ),
        Condition(
            (f"{section}.offload_policy",),
            _is_one_process,
            "not built yet for a run on one device",
        ),
        Condition(
            (f"{section}.param_offload",),
            lambda c: _is_one_process(c) and c.trainer.device == "cpu",
            "on a CPU weights are in the host's memory anyway",
        ),
        Condition(
            (f"{section}.param_offload", f"{section}.optimizer_offload"),
            lambda c: layout(c).offload_policy and not _is_one_process(c),
            f"{section}.offload_policy=True keeps them in the host's memory all the time",
        ),
    )


def _computes_with_trained_weights(config: RunConfig | SftConfig) -> bool:
    """On one device, without a copy in another precision."""
    is_run = isinstance(config, RunConfig)
    layout = config.actor_rollout_ref.actor.fsdp_config if is_run else config.engine
    return layout.model_dtype == layout.dtype and _is_one_process(config)


def _computes_with_critics_weights(config: RunConfig) -> bool:
    layout = config.critic.model.fsdp_config
    return layout.model_dtype == layout.dtype and _is_one_process(config)


_COMPUTED_WITH = (
    "model_dtype and dtype are the same: what is computed with are the trained weights themselves, "
    "which stay on the device"
)


def _takes_turns(config: RunConfig) -> bool:
    placement = _placement(config)
    return placement is not None and not placement.generates_apart


def _is_decided_by_groups(config: RunConfig) -> bool:
    """Without a hybrid engine groups are what is expected, unless they undo it; the asynchronous
    pipeline asks for it even then."""
    trainer = config.trainer
    is_undone = _takes_turns(config) and not trainer.async_pipeline
    hybrid = config.actor_rollout_ref.hybrid_engine
    return bool(trainer.separated_node_tasks) and (hybrid or is_undone)


def _has_other_platforms(config: RunConfig) -> bool:
    placement = _placement(config)
    return placement is not None and all(
        pool.platform != config.trainer.device for pool in placement.used_pools
    )


ONE_PROCESS = "there is one process: nothing is dealt, gathered or transferred"

_RUN_ONLY = (
    *_layout_conditions(
        _ACTOR, lambda c: c.actor_rollout_ref.actor.fsdp_config, tasks=("actor-train", "logp")
    ),
    Condition((f"{_ACTOR}.param_offload",), _computes_with_trained_weights, _COMPUTED_WITH),
    *_layout_conditions(_REF, lambda c: c.actor_rollout_ref.ref.fsdp_config, tasks=("ref_logp",)),
    *_layout_conditions(_CRITIC, lambda c: c.critic.model.fsdp_config, tasks=("actor-train",)),
    *_layout_conditions(
        _REWARD_MODEL, lambda c: c.reward_model.model.fsdp_config, tasks=("actor-train",)
    ),
    Condition((f"{_CRITIC}.param_offload",), _computes_with_critics_weights, _COMPUTED_WITH),
    Condition(
        (
            "actor_rollout_ref.nccl_timeout",
            f"{_ROLLOUT}.param_update_preduce_bucket_size_mb",
            f"{_ROLLOUT}.param_update_consume_bucket_size_mb",
            "pools.transport",
        ),
        _is_one_process,
        ONE_PROCESS,
    ),
    *(
        Condition(
            (f"pools.{task}.platform",),
            partial(_is_not_done, task=task),
            "nothing in the run asks for this task",
        )
        for task in ("logp", "ref_logp")
    ),
    Condition(
        (f"{_ROLLOUT}.enable_dual_buffer", f"{_ROLLOUT}.enable_param_async"),
        _takes_turns,
        "the same devices train and generate: neither goes on while weights are updated",
    ),
    Condition(
        (f"{_ROLLOUT}.free_cache_engine",),
        lambda c: _is_one_process(c) or not _takes_turns(c) or c.trainer.max_lag > 0,
        "for several devices that train and generate one after the other",
    ),
    Condition(
        ("actor_rollout_ref.hybrid_engine",),
        _is_decided_by_groups,
        "trainer.separated_node_tasks is set and decides",
    ),
    Condition(
        ("trainer.device",),
        _has_other_platforms,
        "every pool's platform is named by pools.*.platform",
    ),
)
_SFT_ONLY = (
    *_layout_conditions("engine", lambda c: c.engine, tasks=("actor-train",)),
    Condition(("engine.param_offload",), _computes_with_trained_weights, _COMPUTED_WITH),
    Condition(
        ("engine.param_offload",),
        lambda c: c.engine.param_offload and not _is_one_process(c),
        "the weights are always computed with: engine.offload_policy keeps them on the host",
    ),
    Condition(("nccl_timeout",), _is_one_process, ONE_PROCESS),
)
_SHARED = (
    Condition(
        ("ray_kwargs", "trainer.ray_wait_register_center_timeout"), _is_one_process, ONE_PROCESS
    ),
    Condition(
        ("trainer.balance_batch",),
        _deals_to_one,
        "micro-batches are computed one at a time: there is nothing to balance",
    ),
)

RUN_DEVICE_CONDITIONS: tuple[Condition, ...] = (*_RUN_ONLY, *_SHARED)
SFT_DEVICE_CONDITIONS: tuple[Condition, ...] = (*_SFT_ONLY, *_SHARED)
