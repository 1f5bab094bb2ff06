# SPDX-License-Identifier: Apache-2.0
"""The jobs of pools from a configuration and its placement, and the engines over running pools.

All functions but those that return engines are pure. No process is started here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from tandem.api import Capacity, Engines, WorkerGroup
from tandem.comm.store import StorePlace
from tandem.config.derived.pools import (
    CRITIC,
    REWARD_MODEL,
    Placement,
    Pool,
    reference_of,
    replaces_workers,
    scorer_of,
)
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.rollout import RolloutConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.platforms.record import Platform
from tandem.platforms.select import DTYPES
from tandem.types import TokenIds
from tandem.weight_sync.handshake import LinkSettings
from tandem.weight_sync.transport_choice import TransportKind
from tandem.workers.calls import call_at_start
from tandem.workers.job import LinkSpec, PolicySpec, RolloutSpec, TrainerSpec, WorkerJob
from tandem.workers.remote import PeakMemory, RemotePolicy, RemoteTrainer
from tandem.workers.remote_rollout import RemoteRollout, RemoteStage, WeightRoute
from tandem.workers.replacement import Replacements

_MEBIBYTE = 1 << 20


def policy_spec(config: RunConfig | SftConfig, placement: Placement, *, task: str) -> PolicySpec:
    """Return the model that does ``task``, which may also be the critic or the reward model."""
    trained, seed = trained_model(config), config.trainer.seed
    model = trained.of_task.get(task, trained.of_task["actor-train"])
    is_reward_model = task == REWARD_MODEL
    adapters = None if task in (CRITIC, REWARD_MODEL) else trained.adapters
    if task == "ref_logp" and adapters is not None and adapters.folder is None:
        adapters = None  # new ones have no effect
    return PolicySpec(
        model.config,
        model.layout,
        placement.layouts[task],
        random_seed=None if trained.load_weight or is_reward_model else seed,
        section=model.section,
        value_head_seed=seed if task == CRITIC else None,
        is_reward_model=is_reward_model,
        adapters=adapters,
        adapter_seed=seed,
        freezes_tower=trained.freezes_tower and task not in (CRITIC, REWARD_MODEL),
        freezes_router=trained.freezes_router and task not in (CRITIC, REWARD_MODEL),
    )


def trainer_spec(
    config: RunConfig | SftConfig, placement: Placement, *, task: str, total_steps: int
) -> TrainerSpec:
    """Return the spec of the trained policy, or of the critic."""
    optim = trained_model(config).of_task[task].optim
    assert optim is not None, "a model in training has an optimizer"
    return TrainerSpec(policy_spec(config, placement, task=task), optim, total_steps)


def pool_jobs(
    config: RunConfig | SftConfig,
    placement: Placement,
    *,
    platforms: Mapping[str, Platform],
    store: StorePlace,
    eos_ids: TokenIds,
    total_steps: int,
) -> dict[str, WorkerJob]:
    """Return the job of each used pool, by the pool's name.

    Args:
        platforms: the platform of each of these pools.
        store: the place of the driver's store.
    """
    training = platforms[placement.pool_of("actor-train").name]
    trained = trained_model(config)
    is_mixed = len({platform.name for platform in platforms.values()}) > 1

    def policy(task: str) -> PolicySpec:
        spec = policy_spec(config, placement, task=task)
        return _with_precision_of(training, spec) if is_mixed else spec

    def trainer(task: str) -> TrainerSpec:
        spec = trainer_spec(config, placement, task=task, total_steps=total_steps)
        return replace(spec, policy=policy(task))

    links: Mapping[str, LinkSpec] = {}
    rollouts: dict[str, RolloutSpec] = {}
    if isinstance(config, RunConfig):
        links = _links(config, placement, crosses=is_mixed)
        generating = placement.pool_of("generate")
        rollouts[generating.name] = _rollout_spec(
            config, generating, policy=policy("actor-train"), eos_ids=eos_ids
        )

    def reference(pool: Pool) -> PolicySpec | None:
        """Return the reference, unless it computes with the base of adapters."""
        if isinstance(config, SftConfig) or reference_of(pool, config=config) != "ref_logp":
            return None
        return policy("ref_logp")

    def job(pool: Pool) -> WorkerJob:
        auxiliary = placement.layouts if "actor-train" in pool.tasks else {}
        return WorkerJob(
            platform=platforms[pool.name],
            store=store,
            timeout_s=trained.timeout_s,
            trainer=trainer("actor-train") if "actor-train" in pool.tasks else None,
            critic=trainer(CRITIC) if CRITIC in auxiliary else None,
            reward_model=policy(REWARD_MODEL) if REWARD_MODEL in auxiliary else None,
            scorer=policy("logp") if scorer_of(pool) == "logp" else None,
            reference=reference(pool),
            base=policy("actor-train") if trained.adapters or trained.freezes_tower else None,
            rollout=rollouts.get(pool.name),
            link=links.get(pool.name),
            is_replaceable=pool.name in replaceable_pools(config, placement),
        )

    return {pool.name: job(pool) for pool in placement.used_pools}


def _rollout_spec(
    config: RunConfig, pool: Pool, *, policy: PolicySpec, eos_ids: TokenIds
) -> RolloutSpec:
    rollout = config.actor_rollout_ref.rollout
    return RolloutSpec(
        policy,
        rollout.model_copy(update={"free_cache_engine": config.frees_cache}),
        eos_ids,
        scores=scorer_of(pool) == "generate",
        max_length=trained_model(config).max_tokens,
        is_reference=reference_of(pool, config=config) == "generate",
    )


def replaceable_pools(config: RunConfig | SftConfig, placement: Placement) -> Sequence[str]:
    """Return the names of the pools whose workers are started again when they end."""
    if isinstance(config, SftConfig):
        return ()
    replaces = replaces_workers(config.actor_rollout_ref.rollout, placement)
    return (placement.pool_of("generate").name,) if replaces else ()


def _with_precision_of(training: Platform, spec: PolicySpec) -> PolicySpec:
    """Replace ``dtype=auto`` by the precision of the trainer's platform."""
    if spec.layout.dtype != "auto":
        return spec
    names = {dtype: name for name, dtype in DTYPES.items()}
    layout = spec.layout.model_copy(update={"dtype": names[training.compute_dtype]})
    return replace(spec, layout=layout)


def remote_engines(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, rollout: RolloutConfig
) -> tuple[Engines, Callable[[], PeakMemory]]:
    """Return the engines over running pools, and the peak memory of the devices that train.

    Args:
        groups: the running pools by their names in ``placement``.
    """
    train = remote_trainer(groups, placement)
    critic = remote_trainer(groups, placement, task=CRITIC) if CRITIC in placement.layouts else None
    linked = {pool.name: groups[pool.name] for pool in _linked_pools(placement)}
    route = WeightRoute(list(linked.values()))
    if placement.generates_apart and (rollout.enable_param_async or rollout.enable_dual_buffer):
        busy = [placement.pool_of(task).name for task in ("generate", "actor-train")]
        scoring = [group for name, group in linked.items() if name not in busy]
        route = WeightRoute(route.linked, scoring, is_staged=True)
    generating = groups[placement.pool_of("generate").name]
    replaces = replaces_workers(rollout, placement)
    remote = RemoteRollout(
        generating,
        route,
        ranks_per_engine=rollout.ranks_per_engine,
        replacements=Replacements(
            generating,
            route.linked,
            max_restarts=rollout.max_engine_restarts if replaces else 0,
        ),
    )
    call_at_start(route.linked, "join_link", 0)
    engines = Engines(
        train=train,
        rollout=remote,
        reference=_frozen(groups, placement, task="ref_logp", pool_of="ref_logp"),
        scorer=_scorer(groups, placement, train=train),
        stage=RemoteStage(route.linked) if route.is_staged else None,
        critic=critic,
        reward_model=_frozen(groups, placement, task=REWARD_MODEL, pool_of="actor-train"),
        work=remote.work,
        generates_apart=placement.generates_apart,
        lacks_weights=remote.lacks_weights,
        num_rows=_num_rows(call_at_start([generating], "capacity")[:: rollout.ranks_per_engine]),
    )
    trainers = [train] if critic is None else [train, critic]
    # While the critic warms up, the policy has no peak.
    return engines, lambda: PeakMemory.most(trainer.peak for trainer in trainers)


def _num_rows(capacities: list[Capacity]) -> int | None:
    rows = [capacity.num_rows for capacity in capacities]
    return None if None in rows else sum(number for number in rows if number is not None)


def remote_trainer(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, task: str = "actor-train"
) -> RemoteTrainer:
    """Return the engine that trains the policy, or the critic."""
    group = groups[placement.pool_of("actor-train").name]
    return RemoteTrainer(group, task, layout=placement.layouts[task])


def _frozen(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, task: str, pool_of: str
) -> RemotePolicy | None:
    """Return the engine of a model that only scores, None if the run has no such model."""
    if task not in placement.layouts:
        return None
    group = groups[placement.pool_of(pool_of).name]
    return RemotePolicy(group, task, layout=placement.layouts[task])


def _scorer(
    groups: Mapping[str, WorkerGroup], placement: Placement, *, train: RemoteTrainer
) -> RemotePolicy:
    """Return the engine that computes old log-probs: the trainer, or a model of another pool."""
    if "logp" not in placement.layouts:
        return train
    pool = placement.pool_of("logp")
    task = scorer_of(pool)
    assert task is not None, "the pool of logp has a scorer"
    if task == "actor-train":
        return train
    return RemotePolicy(groups[pool.name], task, layout=placement.layouts["logp"])


def _linked_pools(placement: Placement) -> list[Pool]:
    """Return the pools that send weights or need them."""
    return [pool for pool in placement.used_pools if {*pool.tasks} - {"ref_logp"}]


def _links(config: RunConfig, placement: Placement, *, crosses: bool) -> dict[str, LinkSpec]:
    rollout = config.actor_rollout_ref.rollout
    pools, is_apart = _linked_pools(placement), placement.generates_apart
    transport = config.pools.transport
    ends = list(accumulate(pool.num_devices for pool in pools))
    settings = LinkSettings(
        send_bucket_bytes=rollout.param_update_preduce_bucket_size_mb * _MEBIBYTE,
        receive_bucket_bytes=rollout.param_update_consume_bucket_size_mb * _MEBIBYTE,
        timeout_s=config.actor_rollout_ref.nccl_timeout,
        double_buffered=rollout.enable_dual_buffer and is_apart,
        staged=rollout.enable_param_async and is_apart,
        transport=None if transport == "auto" else TransportKind(transport),
    )
    return {
        pool.name: LinkSpec(
            first_rank=end - pool.num_devices,
            size=ends[-1],
            crosses=crosses,
            settings=settings,
        )
        for pool, end in zip(pools, ends, strict=True)
    }
