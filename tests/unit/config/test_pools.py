# SPDX-License-Identifier: Apache-2.0
"""Devices over task groups: shares, contiguous ranges, and how the ranks of a pool divide."""

from __future__ import annotations

import pytest

from tandem.config.derived.pools import (
    Device,
    NodeRange,
    Placement,
    RankLayout,
    place_run,
    place_sft,
    scorer_of,
)
from tandem.config.parse.overrides import load_config
from tandem.config.parse.shares import share_devices
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

RED_MOE = (
    "+trainer.sperated_node_tasks=[[logp,actor-train],ref_logp,generate]",
    "+trainer.sperated_node_ratios=[0.5,0.25,0.25]",
)
LAYOUT = "actor_rollout_ref.actor.fsdp_config"
KL = "actor_rollout_ref.actor.use_kl_loss=True"
ON_POLICY = "actor_rollout_ref.actor.ppo_mini_batch_size=1024"


def placed(*arguments: str) -> Placement:
    return place_run(load_config(RunConfig, arguments).config)


@pytest.mark.parametrize(
    ("ratios", "devices", "shares"),
    [
        ((0.5, 0.25, 0.25), 8, (4, 2, 2)),
        ((0.5, 0.25, 0.25), 16, (8, 4, 4)),
        ((0.5, 0.25, 0.25), 32, (16, 8, 8)),
        ((0.5, 0.25, 0.25), 4, (2, 1, 1)),
        ((0.25, 0.25, 0.25, 0.25), 8, (2, 2, 2, 2)),
        ((0.5, 0.5), 8, (4, 4)),
        ((0.34, 0.33, 0.33), 8, (3, 3, 2)),
        ((0.1, 0.2, 0.7), 10, (1, 2, 7)),
        ((0.58, 0.42), 100, (58, 42)),
        ((0.5, 0.25), 8, (4, 2)),
        ((0.9, 0.1), 4, (4, 0)),
    ],
)
def test_02_devices_are_shared_by_largest_remainder(
    ratios: tuple[float, ...], devices: int, shares: tuple[int, ...]
) -> None:
    assert share_devices(ratios, devices) == shares


def test_02_largest_remainders_lose_no_device() -> None:
    for parts in ((1, 1, 1), (3, 2, 2), (5, 1, 1, 1), (1, 2, 4, 6)):
        ratios = [part / sum(parts) for part in parts]
        for devices in range(1, 40):
            assert sum(share_devices(ratios, devices)) == devices


def test_one_pool_does_all_that_the_run_needs_unless_tasks_are_separated() -> None:
    (pool,) = placed("trainer.n_gpus_per_node=8", KL).pools
    assert pool.tasks == ("actor-train", "logp", "ref_logp", "generate")
    assert (pool.first_device, pool.num_devices) == (0, 8)
    (pool,) = placed("trainer.n_gpus_per_node=8").pools
    assert pool.tasks == ("actor-train", "logp", "generate")
    assert pool.unused_tasks == ("ref_logp",)
    (pool,) = placed(ON_POLICY).pools
    assert pool.tasks == ("actor-train", "generate")


def test_without_a_hybrid_engine_half_of_the_devices_generate() -> None:
    placement = placed("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=8")
    assert [(pool.tasks[0], pool.num_devices) for pool in placement.pools] == [
        ("actor-train", 4),
        ("generate", 4),
    ]


def test_02_groups_keep_their_order_and_a_bare_task_is_a_group() -> None:
    pools = placed(*RED_MOE, KL, "trainer.n_gpus_per_node=8").pools
    assert [pool.tasks for pool in pools] == [("logp", "actor-train"), ("ref_logp",), ("generate",)]
    assert [pool.name for pool in pools] == ["logp+actor-train", "ref_logp", "generate"]


def test_pools_are_contiguous_and_know_their_nodes() -> None:
    placement = placed(*RED_MOE, KL, "trainer.nnodes=3", "trainer.n_gpus_per_node=4")
    assert [(pool.first_device, pool.num_devices) for pool in placement.pools] == [
        (0, 6),
        (6, 3),
        (9, 3),
    ]
    training, reference, generating = placement.pools
    assert placement.devices_of(training)[3:] == (Device(0, 3), Device(1, 0), Device(1, 1))
    assert placement.node_ranges(training) == (NodeRange(0, 0, 3), NodeRange(1, 0, 1))
    assert placement.node_ranges(reference) == (NodeRange(1, 2, 3), NodeRange(2, 0, 0))
    assert placement.node_ranges(generating) == (NodeRange(2, 1, 3),)
    everywhere = [d for pool in placement.pools for d in placement.devices_of(pool)]
    assert everywhere == [Device(node, index) for node in range(3) for index in range(4)]


def test_03_a_pool_whose_tasks_nothing_asks_for_is_not_used() -> None:
    placement = placed(*RED_MOE, "trainer.n_gpus_per_node=4")
    assert [pool.tasks for pool in placement.pools] == [("logp", "actor-train"), (), ("generate",)]
    assert placement.pools[1].unused_tasks == ("ref_logp",)
    assert [pool.name for pool in placement.used_pools] == ["logp+actor-train", "generate"]
    assert "ref_logp" not in placement.layouts
    assert placement.pool_of("generate").num_devices == 1


def test_only_what_the_run_does_names_the_platform_of_its_devices() -> None:
    halves = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
    device, named = "trainer.device=cpu", "pools.ref_logp.platform=musa"
    assert [pool.platform for pool in placed(*halves, device, named).pools] == ["cpu", "cpu"]
    assert [pool.platform for pool in placed(*halves, device, named, KL).pools] == ["musa", "cpu"]
    separated = placed(*RED_MOE, device, named, "trainer.n_gpus_per_node=4")
    assert {pool.platform for pool in separated.pools} == {"cpu"}


@pytest.mark.parametrize(("size", "num_shards"), [(-1, 4), (2, 2), (4, 4), (16, 4)])
def test_weights_are_sharded_over_all_devices_if_there_are_no_more(
    size: int, num_shards: int
) -> None:
    placement = placed("trainer.n_gpus_per_node=4", f"{LAYOUT}.fsdp_size={size}")
    assert placement.layouts["actor-train"].num_shards == num_shards


def test_data_parallel_ranks_are_what_tensor_and_sequence_parallel_leave() -> None:
    placement = placed(
        *RED_MOE,
        KL,
        "trainer.n_gpus_per_node=16",
        f"{LAYOUT}.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.fsdp_config.tensor_model_parallel_size=1",
        f"{LAYOUT}.fsdp_size=2",
    )
    trained = placement.layouts["actor-train"]
    assert (trained.num_ranks, trained.ranks_per_microbatch, trained.data_parallel) == (8, 4, 2)
    assert trained.num_shards == 2
    assert placement.layouts["logp"] == trained
    scored = placement.layouts["ref_logp"]
    assert (scored.num_ranks, scored.tensor_parallel, scored.sequence_parallel) == (4, 1, 2)
    assert scored.data_parallel == 2
    assert placement.layouts["generate"].data_parallel == 4


def test_the_policy_scores_with_weights_that_its_pool_holds_anyway() -> None:
    def scoring(tasks: str) -> tuple[str | None, RankLayout]:
        placement = placed(
            f"trainer.separated_node_tasks={tasks}",
            "trainer.separated_node_ratios=[0.5,0.5]",
            "trainer.n_gpus_per_node=8",
            f"{LAYOUT}.tensor_model_parallel_size=2",
        )
        return scorer_of(placement.pool_of("logp")), placement.layouts["logp"]

    sharded = RankLayout(4, tensor_parallel=2, sequence_parallel=1, num_shards=2)
    assert scoring("[[logp,actor-train],generate]") == ("actor-train", sharded)
    whole = RankLayout(4, tensor_parallel=1, sequence_parallel=1, num_shards=1)
    assert scoring("[actor-train,[logp,generate]]") == ("generate", whole)
    assert scoring("[logp,[actor-train,generate]]") == ("logp", sharded)
    assert scorer_of(placed(ON_POLICY).pools[0]) is None


def test_without_a_size_all_ranks_shard_together() -> None:
    split = f"{LAYOUT}.tensor_model_parallel_size=4"
    assert placed("trainer.n_gpus_per_node=8", split).layouts["actor-train"].num_shards == 2
    assert placed("trainer.n_gpus_per_node=8").layouts["actor-train"].num_shards == 8


def test_one_process_is_one_device_that_does_everything() -> None:
    assert placed().is_one_process
    assert not placed("trainer.n_gpus_per_node=2").is_one_process
    split = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2")
    assert not placed(*split).is_one_process


def test_supervised_runs_have_one_pool() -> None:
    arguments = ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "engine.fsdp_size=4")
    config = load_config(SftConfig, [*arguments, "ulysses_sequence_parallel_size=2"]).config
    placement = place_sft(config)
    (pool,) = placement.pools
    assert (pool.tasks, pool.num_devices) == (("actor-train",), 8)
    layout = placement.layouts["actor-train"]
    assert (layout.data_parallel, layout.num_shards) == (4, 4)
