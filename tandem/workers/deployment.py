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
from tandem.config.pools import Placement, Pool, scorer_of
from tandem.config.run import RunConfig
from tandem.config.sft import SftConfig
from tandem.types import TokenIds
from tandem.workers.job import LinkSpec, PolicySpec, RolloutSpec, TrainerSpec, WorkerJob
from tandem.workers.remote import RemotePolicy, RemoteRollout, RemoteTrainer, send_weights

_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class RemoteEngines:
    """The engines of a run over its pools; see ``pipeline.parts.Engines``."""

    train: RemoteTrainer
    rollout: RemoteRollout
    reference: ReferencePolicy | None
    scorer: ReferencePolicy


def run_jobs(
    config: RunConfig,
    placement: Placement,
    *,
    store: tuple[str, int],
    eos_ids: TokenIds,
    total_steps: int,
) -> dict[str, WorkerJob]:
    """The job of each pool that has something to do, by its name.

    Args:
        store: host and port of the driver's store.
    """
    roles = config.actor_rollout_ref
    actor_layout = roles.actor.fsdp_config
    seed = None if roles.actor.load_weight else config.trainer.seed
    links = _links(config, placement)

    def policy(task: str) -> PolicySpec:
        layout = roles.ref.fsdp_config if task == "ref_logp" else actor_layout
        return PolicySpec(
            roles.model, layout, placement.layouts[task], random_seed=seed, section=section_of(task)
        )

    return {
        pool.name: WorkerJob(
            device=config.trainer.device,
            store=store,
            timeout_s=roles.nccl_timeout,
            trainer=TrainerSpec(policy("actor-train"), roles.actor.optim, total_steps)
            if "actor-train" in pool.tasks
            else None,
            scorer=policy("logp") if scorer_of(pool) == "logp" else None,
            reference=policy("ref_logp") if "ref_logp" in pool.tasks else None,
            rollout=RolloutSpec(roles.model, actor_layout, roles.rollout, eos_ids)
            if "generate" in pool.tasks
            else None,
            link=links.get(pool.name),
        )
        for pool in placement.used_pools
    }


def section_of(task: str) -> str:
    """Of the keys that lay out the weights of a task of ``tandem train``."""
    role = "ref" if task == "ref_logp" else "actor"
    return f"actor_rollout_ref.{role}.fsdp_config"


def sft_jobs(
    config: SftConfig, placement: Placement, *, store: tuple[str, int], total_steps: int
) -> dict[str, WorkerJob]:
    """As ``run_jobs``, for fine-tuning."""
    (pool,) = placement.used_pools
    ranks = placement.layouts["actor-train"]
    policy = PolicySpec(config.model, config.engine, ranks, random_seed=None, section="engine")
    job = WorkerJob(
        device=config.trainer.device,
        store=store,
        timeout_s=config.nccl_timeout,
        trainer=TrainerSpec(policy, config.optim, total_steps),
    )
    return {pool.name: job}


def remote_engines(groups: Mapping[str, WorkerGroup], placement: Placement) -> RemoteEngines:
    """The engines over running pools, each named in ``groups`` as in ``placement``."""
    linked = [groups[pool.name] for pool in _linked_pools(placement)]
    train = remote_trainer(groups, placement)
    return RemoteEngines(
        train=train,
        rollout=RemoteRollout(
            groups[placement.pool_of("generate").name],
            send_weights=partial(send_weights, linked),
        ),
        reference=_reference(groups, placement),
        scorer=_scorer(groups, placement, train=train),
    )


def remote_trainer(groups: Mapping[str, WorkerGroup], placement: Placement) -> RemoteTrainer:
    """The engine that trains."""
    group = groups[placement.pool_of("actor-train").name]
    return RemoteTrainer(group, layout=placement.layouts["actor-train"])


def _reference(groups: Mapping[str, WorkerGroup], placement: Placement) -> RemotePolicy | None:
    if "ref_logp" not in placement.layouts:
        return None
    group = groups[placement.pool_of("ref_logp").name]
    return RemotePolicy(group, "ref_logp", layout=placement.layouts["ref_logp"])


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


def _links(config: RunConfig, placement: Placement) -> dict[str, LinkSpec]:
    rollout = config.actor_rollout_ref.rollout
    pools = _linked_pools(placement)
    ends = list(accumulate(pool.num_devices for pool in pools))
    return {
        pool.name: LinkSpec(
            first_rank=end - pool.num_devices,
            size=ends[-1],
            send_bucket_bytes=rollout.param_update_preduce_bucket_size_mb * _MEBIBYTE,
            receive_bucket_bytes=rollout.param_update_consume_bucket_size_mb * _MEBIBYTE,
        )
        for pool, end in zip(pools, ends, strict=True)
    }
