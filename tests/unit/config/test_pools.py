# SPDX-License-Identifier: Apache-2.0
"""Devices over task groups."""

from __future__ import annotations

import pytest

from tandem.config.overrides import load_config
from tandem.config.pools import plan_pools, share_devices
from tandem.config.run import RunConfig
from tandem.config.validate import check_run
from tandem.errors import UserError

RED_MOE = "+trainer.sperated_node_tasks=[[logp,actor-train],ref_logp,generate]"
RED_MOE_RATIOS = "+trainer.sperated_node_ratios=[0.5,0.25,0.25]"


def config(*arguments: str) -> RunConfig:
    return load_config(RunConfig, arguments).config


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
        ((0.5, 0.25), 8, (4, 2)),
        ((0.9, 0.1), 4, (4, 0)),
    ],
)
def test_devices_are_shared_by_largest_remainder(
    ratios: tuple[float, ...], devices: int, shares: tuple[int, ...]
) -> None:
    assert share_devices(ratios, devices) == shares


def test_one_pool_holds_all_tasks_unless_they_are_separated() -> None:
    (pool,) = plan_pools(config("trainer.n_gpus_per_node=8"))
    assert set(pool.tasks) == {"actor-train", "logp", "ref_logp", "generate"}
    assert pool.devices == 8


def test_without_a_hybrid_engine_half_of_the_devices_generate() -> None:
    pools = plan_pools(config("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=8"))
    assert [(pool.tasks[0], pool.devices) for pool in pools] == [
        ("actor-train", 4),
        ("generate", 4),
    ]


def test_groups_keep_their_order_and_a_bare_task_is_a_group() -> None:
    pools = plan_pools(config(RED_MOE, RED_MOE_RATIOS, "trainer.n_gpus_per_node=8"))
    assert [pool.tasks for pool in pools] == [("logp", "actor-train"), ("ref_logp",), ("generate",)]


@pytest.mark.parametrize(
    ("tasks", "ratios", "message"),
    [
        ("[[logp,train],generate]", "[0.5,0.5]", "'train' is no task. Name each of actor-train"),
        ("[actor-train,generate,generate]", "[0.2,0.2,0.2]", "'generate' is named more than once"),
        ("[actor-train]", "[1.0]", "generate is missing. Add it to a group."),
        ("[actor-train,generate]", "[0.5]", "must have one ratio for each of the 2 groups"),
        ("[actor-train,generate]", "[0.6,0.6]", "must be positive and add up to at most 1"),
        ("[actor-train,generate]", "[1.0,0.0]", "must be positive and add up to at most 1"),
    ],
)
def test_groups_that_make_no_sense_are_refused(tasks: str, ratios: str, message: str) -> None:
    arguments = (f"trainer.separated_node_tasks={tasks}", f"trainer.separated_node_ratios={ratios}")
    with pytest.raises(UserError, match="trainer.separated_node_") as caught:
        check_run(config(*arguments))
    assert message in str(caught.value)
