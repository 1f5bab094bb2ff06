# SPDX-License-Identifier: Apache-2.0
"""From a configuration and its placement to what each pool does, and from running pools to engines.

Pure functions of plain values, but for the engines they return. Starting processes is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from tandem.api import ReferencePolicy, WorkerGroup
from tandem.config.check.device_rules import section_of
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, Placement, Pool, scorer_of
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.platforms.record import Platform
from tandem.platforms.select import DTYPES
from tandem.types import TokenIds
from tandem.weight_sync.transport_choice import Way
from tandem.workers.job import LinkSpec, PolicySpec, RolloutSpec, TrainerSpec, WorkerJob
from tandem.workers.remote import (
    RemotePolicy,
    RemoteRollout,
    RemoteStage,
    RemoteTrainer,
    WeightWay,
)

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteEngines:
    """The engines of a run over its pools; see ``pipeline.context.Engines``."""

    train: RemoteTrainer
    rollout: RemoteRollout
    reference: ReferencePolicy | None
    scorer: ReferencePolicy
    stage: RemoteStage | None
    critic: RemoteTrainer | None
    reward_model: ReferencePolicy | None


def run_jobs(
    config: RunConfig,
    placement: Placement,
    *,
    platforms: Mapping[str, Platform],
    store: tuple[str, int],
    eos_ids: TokenIds,
    total_steps: int,
) -> dict[str, WorkerJob]:
    """The job of each pool that has something to do, by its name.

    Args:
        platforms: of each of them.
        store: host and port of the driver's store.
    """
    roles = config.actor_rollout_ref
    training = platforms[placement.pool_of("actor-train").name]
    settled = partial(_settle_dtype, platforms=platforms, training=training)
    actor_layout = settled(roles.actor.fsdp_config)
    seed = None if roles.actor.load_weight else config.trainer.seed
    rollout = roles.rollout.model_copy(update={"free_cache_engine": config.frees_cache})
    links = _links(config, placement, crosses=len({p.name for p in platforms.values()}) > 1)

    def policy(task: str) -> PolicySpec:
        layout = settled(roles.ref.fsdp_config) if task == "ref_logp" else actor_layout
        return PolicySpec(
            roles.model, layout, placement.layouts[task], random_seed=seed, section=section_of(task)
        )

    return {
        pool.name: WorkerJob(
            platform=platforms[pool.name],
            store=store,
            timeout_s=roles.nccl_timeout,
            trainer=TrainerSpec(policy("actor-train"), roles.actor.optim, total_steps)
            if "actor-train" in pool.tasks
            else None,
            critic=_critic(
                config,
                placement,
                layout=settled(config.critic.model.fsdp_config),
                total_steps=total_steps,
            )
            if "actor-train" in pool.tasks and config.uses_critic
            else None,
            reward_model=_reward_model(
                config, placement, layout=settled(config.reward_model.model.fsdp_config)
            )
            if "actor-train" in pool.tasks and config.reward_model.enable
            else None,
            scorer=policy("logp") if scorer_of(pool) == "logp" else None,
            reference=policy("ref_logp") if "ref_logp" in pool.tasks else None,
            rollout=RolloutSpec(roles.model, actor_layout, rollout, eos_ids)
            if "generate" in pool.tasks
            else None,
            link=links.get(pool.name),
        )
        for pool in placement.used_pools
    }


def _critic(
    config: RunConfig, placement: Placement, *, layout: FsdpConfig, total_steps: int
) -> TrainerSpec:
    policy = PolicySpec(
        config.critic.model,
        layout,
        placement.layouts[CRITIC],
        random_seed=None if config.actor_rollout_ref.actor.load_weight else config.trainer.seed,
        section=section_of(CRITIC),
        value_head_seed=config.trainer.seed,
    )
    return TrainerSpec(policy, config.critic.optim, total_steps)


def _reward_model(config: RunConfig, placement: Placement, *, layout: FsdpConfig) -> PolicySpec:
    return PolicySpec(
        config.reward_model.model,
        layout,
        placement.layouts[REWARD_MODEL],
        random_seed=None,
        section=section_of(REWARD_MODEL),
        is_reward_model=True,
    )


def _settle_dtype(
    layout: FsdpConfig, *, platforms: Mapping[str, Platform], training: Platform
) -> FsdpConfig:
    """``dtype=auto`` is what the trainer's devices compute in, also for pools of other devices:
    what generates should compute what trains."""
    if layout.dtype != "auto" or len({platform.name for platform in platforms.values()}) == 1:
        return layout
    names = {dtype: name for name, dtype in DTYPES.items()}
    return layout.model_copy(update={"dtype": names[training.compute_dtype]})


def sft_jobs(
    config: SftConfig,
    placement: Placement,
    *,
    platforms: Mapping[str, Platform],
    store: tuple[str, int],
    total_steps: int,
) -> dict[str, WorkerJob]:
    """As ``run_jobs``, for fine-tuning."""
    (pool,) = placement.used_pools
    ranks = placement.layouts["actor-train"]
    policy = PolicySpec(config.model, config.engine, ranks, random_seed=None, section="engine")
    job = WorkerJob(
        platform=platforms[pool.name],
        store=store,
        timeout_s=config.nccl_timeout,
        trainer=TrainerSpec(policy, config.optim, total_steps),
    )
    return {pool.name: job}


def remote_engines(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, rollout: RolloutConfig
) -> RemoteEngines:
    """The engines over running pools, each named in ``groups`` as in ``placement``."""
    train = remote_trainer(groups, placement)
    linked = {pool.name: groups[pool.name] for pool in _linked_pools(placement)}
    way = WeightWay(list(linked.values()))
    if placement.generates_apart and (rollout.enable_param_async or rollout.enable_dual_buffer):
        busy = [placement.pool_of(task).name for task in ("generate", "actor-train")]
        scoring = [group for name, group in linked.items() if name not in busy]
        way = WeightWay(way.linked, scoring, is_staged=True)
    return RemoteEngines(
        train=train,
        rollout=RemoteRollout(groups[placement.pool_of("generate").name], way),
        reference=_frozen(groups, placement, task="ref_logp", pool_of="ref_logp"),
        scorer=_scorer(groups, placement, train=train),
        stage=RemoteStage(way.linked) if way.is_staged else None,
        critic=remote_trainer(groups, placement, task=CRITIC)
        if CRITIC in placement.layouts
        else None,
        reward_model=_frozen(groups, placement, task=REWARD_MODEL, pool_of="actor-train"),
    )


def remote_trainer(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, task: str = "actor-train"
) -> RemoteTrainer:
    """The engine that trains the policy, or the critic."""
    group = groups[placement.pool_of("actor-train").name]
    return RemoteTrainer(group, task, layout=placement.layouts[task])


def _frozen(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, task: str, pool_of: str
) -> RemotePolicy | None:
    """The engine of a model that only scores, in the pool of a task; None if the run has none."""
    if task not in placement.layouts:
        return None
    group = groups[placement.pool_of(pool_of).name]
    return RemotePolicy(group, task, layout=placement.layouts[task])


def _scorer(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, train: RemoteTrainer
) -> RemotePolicy:
    """Who scores with the policy as it is: the trainer, unless that is another pool's task."""
    if "logp" not in placement.layouts:
        return train
    pool = placement.pool_of("logp")
    task = scorer_of(pool)
    assert task is not None, "it is the pool of logp"
    if task == "actor-train":
        return train
    return RemotePolicy(groups[pool.name], task, layout=placement.layouts["logp"])


def _linked_pools(placement: Placement) -> list[Pool]:
    """Those that send weights or need them."""
    return [pool for pool in placement.used_pools if {*pool.tasks} - {"ref_logp"}]


def _links(config: RunConfig, placement: Placement, *, crosses: bool) -> dict[str, LinkSpec]:
    rollout = config.actor_rollout_ref.rollout
    pools, is_apart = _linked_pools(placement), placement.generates_apart
    transport = config.pools.transport
    ends = list(accumulate(pool.num_devices for pool in pools))
    return {
        pool.name: LinkSpec(
            first_rank=end - pool.num_devices,
            size=ends[-1],
            send_bucket_bytes=rollout.param_update_preduce_bucket_size_mb * _MEBIBYTE,
            receive_bucket_bytes=rollout.param_update_consume_bucket_size_mb * _MEBIBYTE,
            double_buffered=rollout.enable_dual_buffer and is_apart,
            staged=rollout.enable_param_async and is_apart,
            way=None if transport == "auto" else Way(transport),
            crosses=crosses,
        )
        for pool, end in zip(pools, ends, strict=True)
    }
