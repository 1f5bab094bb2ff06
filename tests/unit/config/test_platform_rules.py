# SPDX-License-Identifier: Apache-2.0
"""Platforms of pools: what is refused, and how weights will cross (A11, A14)."""

from __future__ import annotations

import pytest

from tandem.config.check.platform_rules import platform_key, weight_routes
from tandem.config.check.rules import check_run
from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

_CROSSING = "staged (two platforms, not both with FlagCX)"
HALVES = ("actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=4")
APART = (
    "trainer.n_gpus_per_node=4",
    "trainer.separated_node_tasks=[[actor-train],[generate],[logp]]",
    "trainer.separated_node_ratios=[0.5,0.25,0.25]",
)


def checked(*arguments: str) -> RunConfig:
    config = load_config(RunConfig, arguments).config
    check_run(config)
    return config


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        checked(*arguments)
    return str(caught.value)


def test_a14_each_pool_has_the_platform_that_one_of_its_tasks_names() -> None:
    config = checked(*HALVES, "pools.actor-train.platform=npu", "pools.generate.platform=musa")
    placement = place_run(config)
    assert [pool.platform for pool in placement.pools] == ["npu", "musa"]
    assert placement.is_mixed
    assert [platform_key(pool, config) for pool in placement.pools] == [
        "pools.actor-train.platform",
        "pools.generate.platform",
    ]
    config = checked(*HALVES, "trainer.device=cuda", "pools.generate.platform=cpu")
    placement = place_run(config)
    assert [pool.platform for pool in placement.pools] == ["cuda", "cpu"]
    assert platform_key(placement.pools[0], config) == "trainer.device"
    assert not place_run(checked(*HALVES, "trainer.device=npu")).is_mixed


def test_the_other_spelling_of_a_pool_is_understood() -> None:
    loaded = load_config(RunConfig, ["pools.actor_train.platform=npu"])
    assert loaded.config.pools.named == {"actor-train": "npu"}
    again = RunConfig.model_validate_json(loaded.config.model_dump_json())
    assert again == loaded.config


def test_tasks_that_share_devices_have_one_platform() -> None:
    assert refusal("pools.logp.platform=npu", "pools.actor-train.platform=musa") == (
        "pools.actor-train.platform=musa, pools.logp.platform=npu: these tasks share devices, "
        "which must be of one platform. Name one platform, or give the tasks pools of their own "
        "with trainer.separated_node_tasks."
    )
    assert refusal("pools.generate.platform=musa") == (
        "pools.generate.platform='musa': actor-train shares these devices, but not their platform. "
        "Set trainer.device=musa, or actor_rollout_ref.hybrid_engine=False for devices of their "
        "own."
    )
    checked("pools.generate.platform=cpu", "trainer.device=cpu")
    not_done = ("pools.ref_logp.platform=musa", "pools.actor-train.platform=npu")
    config = checked(*HALVES, *not_done)
    assert platform_key(place_run(config).pools[0], config) == "pools.actor-train.platform"
    assert "these tasks share devices" in refusal(
        *HALVES, *not_done, "actor_rollout_ref.actor.use_kl_loss=True"
    )


def test_a11_interleaved_platforms_are_refused_with_the_order_that_works() -> None:
    platforms = ("trainer.device=npu", "pools.generate.platform=musa")
    assert refusal(*APART, *platforms) == (
        "trainer.separated_node_tasks=[[actor-train],[generate],[logp]]: pools of npu, musa, npu "
        "in this order: those of npu must follow each other, because communication "
        "libraries between vendors rely on it. Set "
        "trainer.separated_node_tasks=[[actor-train],[logp],[generate]] "
        "trainer.separated_node_ratios=[0.5,0.25,0.25]."
    )
    sorted_groups = "trainer.separated_node_tasks=[[actor-train],[logp],[generate]]"
    checked(*APART, *platforms, sorted_groups)


def test_a11_a_pool_whose_platform_is_still_to_be_found_is_not_out_of_order() -> None:
    """It may turn out to be of the platform that stands around it."""
    named = ("pools.actor-train.platform=cuda", "pools.logp.platform=cuda")
    checked(*APART, *named)
    other = "trainer.separated_node_tasks=[[actor-train],[generate],[logp],[ref_logp]]"
    ratios = "trainer.separated_node_ratios=[0.25,0.25,0.25,0.25]"
    between = "pools.generate.platform=musa"
    assert "pools of cuda, musa, cuda in this order" in refusal(
        *APART, other, ratios, "actor_rollout_ref.actor.use_kl_loss=True", *named, between
    )


def test_a_transport_that_cannot_connect_the_platforms_is_refused() -> None:
    mixed = (*HALVES, "trainer.device=npu", "pools.generate.platform=musa")
    assert refusal(*mixed, "pools.transport=collective") == (
        "pools.transport='collective': the pools have npu and musa, which have no library in "
        "common. Set pools.transport=auto."
    )
    third = (*APART, "pools.actor-train.platform=npu", "pools.generate.platform=musa")
    assert "the pools have npu and musa" in refusal(*third, "pools.transport=collective")
    host = (*HALVES, "trainer.device=cpu", "pools.generate.platform=musa")
    assert "a pool is on the host" in refusal(*host, "pools.transport=flagcx")
    checked(*HALVES, "trainer.device=npu", "pools.transport=flagcx")
    # What auto finds may be the platform of the other pool.
    checked(*HALVES, "pools.generate.platform=cuda", "pools.transport=collective")
    assert "must be one of auto, collective, flagcx, staged" in refusal("pools.transport=pigeon")


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        (("trainer.device=npu",), "collective (one platform)"),
        (
            ("trainer.device=npu", "pools.generate.platform=cpu"),
            f"{_CROSSING}: from npu to cpu once, then collective inside",
        ),
        (
            ("trainer.device=mlu", "pools.generate.platform=musa"),
            f"{_CROSSING}: from mlu to musa once, then collective inside",
        ),
        (
            ("trainer.device=mlu", "pools.generate.platform=musa", "pools.transport=staged"),
            "staged (as requested): from mlu to musa once, then collective inside",
        ),
        (
            ("trainer.device=mlu", "pools.generate.platform=musa", "pools.transport=flagcx"),
            "flagcx (as requested): from mlu to musa",
        ),
        (
            ("pools.generate.platform=cpu",),
            "collective if auto finds the platform of the other pool, else staged",
        ),
    ],
)
def test_the_way_of_the_weights_is_known_before_anything_starts(
    arguments: tuple[str, ...], way: str
) -> None:
    config = checked(*HALVES, "actor_rollout_ref.actor.ppo_mini_batch_size=1024", *arguments)
    assert weight_routes(config, place_run(config)) == {"actor-train -> generate": way}
