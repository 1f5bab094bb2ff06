# SPDX-License-Identifier: Apache-2.0
"""The jobs of pools: on several platforms, with a critic, with a reward model."""

from __future__ import annotations

import pytest

from tandem.comm.store import StorePlace
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.platforms.record import CPU, Platform
from tandem.platforms.registry import platform_named
from tandem.weight_sync.transport_choice import TransportKind
from tandem.workers.deployment import pool_jobs
from tandem.workers.job import WorkerJob

NPU = platform_named("npu")
APART = (
    "trainer.n_gpus_per_node=4",
    "trainer.separated_node_tasks=[[actor-train],[ref_logp],[logp],[generate]]",
    "trainer.separated_node_ratios=[0.25,0.25,0.25,0.25]",
    "actor_rollout_ref.actor.use_kl_loss=True",
)


def jobs(*arguments: str, **platforms: Platform) -> dict[str, WorkerJob]:
    config = load_config(RunConfig, [*APART, *arguments]).config
    placement = place_run(config)
    named = {pool.name: platforms.get(pool.name, NPU) for pool in placement.used_pools}
    return pool_jobs(
        config,
        placement,
        platforms=named,
        store=StorePlace("host", 1, "prefix"),
        eos_ids=(0,),
        total_steps=1,
    )


def test_a_cache_is_given_back_only_where_all_is_generated_before_training() -> None:
    one_group = (
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "actor_rollout_ref.rollout.free_cache_engine=True",
    )
    in_turns = ("actor_rollout_ref.hybrid_engine=False", "trainer.async_pipeline=True")
    for keys, frees in (((), True), ((*in_turns, "trainer.generate_ahead_steps=2"), False)):
        (job,) = jobs(*one_group, *keys).values()
        assert job.rollout is not None
        assert job.rollout.config.free_cache_engine == frees


def test_every_pool_computes_in_what_the_trainer_computes_in() -> None:
    mixed = jobs(generate=CPU)
    assert mixed["generate"].platform is CPU
    assert mixed["generate"].rollout is not None
    assert mixed["generate"].rollout.policy.layout.dtype == "bfloat16"
    named = jobs("actor_rollout_ref.actor.fsdp_config.dtype=float32", generate=CPU)
    assert named["generate"].rollout is not None
    assert named["generate"].rollout.policy.layout.dtype == "float32"
    alike = jobs()
    assert alike["generate"].rollout is not None
    assert alike["generate"].rollout.policy.layout.dtype == "auto"


def test_the_link_counts_the_pools_that_share_weights_and_knows_how_they_are_joined() -> None:
    links = {name: job.link for name, job in jobs(generate=CPU).items()}
    assert links.pop("ref_logp") is None
    specs = {name: (link.first_rank, link.size) for name, link in links.items() if link}
    assert specs == {"actor-train": (0, 3), "logp": (1, 3), "generate": (2, 3)}
    assert {(link.crosses, link.settings.transport) for link in links.values() if link} == {
        (True, None)
    }
    staged = jobs("pools.transport=staged")["generate"].link
    assert staged is not None
    assert (staged.crosses, staged.settings.transport) == (False, TransportKind.STAGED)


BUCKETS = tuple(
    f"actor_rollout_ref.rollout.param_update_{way}_bucket_size_mb={size}"
    for way, size in (("preduce", 3), ("consume", 5))
)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("double_buffered", [False, True])
def test_the_link_moves_weights_as_the_keys_say(staged: bool, double_buffered: bool) -> None:
    keys = (
        f"actor_rollout_ref.rollout.enable_param_async={staged}",
        f"actor_rollout_ref.rollout.enable_dual_buffer={double_buffered}",
        *BUCKETS,
    )
    links = [job.link for job in jobs(*keys).values() if job.link is not None]
    assert len(links) == 3
    for link in links:
        moves = link.settings
        assert (moves.staged, moves.double_buffered) == (staged, double_buffered)
        assert (moves.send_bucket_bytes, moves.receive_bucket_bytes) == (3 << 20, 5 << 20)


def test_weights_that_are_replaced_where_they_are_need_no_second_copy() -> None:
    """The trainer's devices generate as well."""
    keys = (
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "actor_rollout_ref.rollout.enable_param_async=True",
        "actor_rollout_ref.rollout.enable_dual_buffer=True",
    )
    (job,) = jobs(*keys).values()
    assert job.link is not None
    assert not job.link.settings.staged and not job.link.settings.double_buffered


def test_a_critic_is_trained_where_the_policy_is_by_its_own_keys() -> None:
    keys = (
        "critic.enable=True",
        "critic.model.path=c",
        "critic.optim.lr=0.1",
        "critic.model.fsdp_config.dtype=float32",
        "actor_rollout_ref.model.path=m",
        "trainer.seed=5",
    )
    found = {name: job.critic for name, job in jobs(*keys).items()}
    critic = found.pop("actor-train")
    assert set(found.values()) == {None}
    assert critic is not None and critic.optim.lr == 0.1
    policy = critic.policy
    assert (policy.model.path, policy.layout.dtype, policy.value_head_seed) == ("c", "float32", 5)
    assert (policy.section, policy.random_seed) == ("critic.model.fsdp_config", None)
    assert jobs()["actor-train"].critic is None


def test_a_reward_model_scores_where_the_policy_trains_by_its_own_keys() -> None:
    keys = (
        "reward_model.enable=True",
        "reward_model.model.path=r",
        "reward_model.model.fsdp_config.param_offload=True",
        "actor_rollout_ref.actor.load_weight=False",
    )
    found = {name: job.reward_model for name, job in jobs(*keys, generate=CPU).items()}
    judge = found.pop("actor-train")
    assert set(found.values()) == {None}
    assert judge is not None and judge.is_reward_model and judge.layout.param_offload
    assert (judge.model.path, judge.layout.dtype) == ("r", "bfloat16")
    assert (judge.section, judge.random_seed) == ("reward_model.model.fsdp_config", None)
    assert jobs()["actor-train"].reward_model is None
