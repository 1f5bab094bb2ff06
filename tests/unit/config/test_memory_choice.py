# SPDX-License-Identifier: Apache-2.0
"""The memory keys that a run sets itself, and those that it leaves to the user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import GIB, plan_memory
from tandem.config.plan.memory_choice import SHARE, SHARE_OF_SEVERAL, choose_memory
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

BILLIONS = ModelSizes(28, 1536, 8960, 12, 2, 128, 151936, True)
"""1.5 billion parameters."""
HALF_BILLION = ModelSizes(24, 896, 4864, 14, 2, 64, 151936, True)
SEVEN_BILLION = ModelSizes(28, 3584, 18944, 28, 4, 128, 152064, False)
ARGUMENTS = (
    "data.train_batch_size=64",
    "data.max_prompt_length=128",
    "data.max_response_length=512",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
)
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ENABLE, GRANULARITY = f"{MODEL}.enable_gradient_checkpointing", f"{MODEL}.recompute_granularity"
WEIGHTS, MOMENTS = (f"{ACTOR}.fsdp_config.{x}_offload" for x in ("param", "optimizer"))
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
CACHE = "actor_rollout_ref.rollout.gpu_memory_utilization"
TWO_GROUPS = 2 * (128 + 8 * 512)


def choose(
    *arguments: str, gib: float, sizes: ModelSizes = SEVEN_BILLION, **settings: Any
) -> dict[str, Any]:
    """Return the chosen keys for devices of this size, whose plan fits them."""
    config = load_config(RunConfig, [*ARGUMENTS, *arguments]).config
    available = int(gib * GIB)
    changed, keys = choose_memory(config, sizes, available_bytes=available, **settings)
    (plan,) = plan_memory(changed, sizes, available_bytes=available).values()
    share = SHARE if config.trainer.n_gpus_per_node == 1 else SHARE_OF_SEVERAL
    assert plan.total <= share * available or not keys
    if not keys:
        assert changed is config
    return dict(keys)


def test_7b_fits_one_device_of_141_gb_without_a_key() -> None:
    assert choose(gib=139.8) == {ENABLE: False, TOKENS: TWO_GROUPS, WEIGHTS: True, MOMENTS: True}


def test_micro_batches_hold_whole_groups_where_these_are_a_little_larger() -> None:
    """In 8192 tokens, one group of 128 + 8 * 512 tokens would leave half of the room empty."""
    assert choose(gib=125)[TOKENS] == TWO_GROUPS
    assert choose("data.max_response_length=600", gib=139.8)[TOKENS] == 8192, "a fifth more"
    assert choose("data.max_response_length=5000", gib=139.8)[TOKENS] == 8192, "in parts anyway"
    two = f"{ACTOR}.ulysses_sequence_parallel_size=2"
    shared = choose("trainer.n_gpus_per_node=4", two, "data.max_response_length=1024", gib=139.8)
    assert shared[TOKENS] == (128 + 8 * 1024) // 2 * 2, "each of two devices has half of a group"


def test_a_size_without_whole_groups_is_taken_where_only_that_fits() -> None:
    fitting = {choose(gib=gib / 4).get(TOKENS) for gib in range(4 * 90, 4 * 140)}
    assert {TWO_GROUPS, 8192} <= fitting


def test_where_there_is_room_nothing_is_recomputed_or_offloaded() -> None:
    assert choose(gib=80, sizes=HALF_BILLION) == {ENABLE: False}
    assert choose(gib=1000) == {ENABLE: False}


def test_the_smaller_the_device_the_more_is_recomputed() -> None:
    long = ("data.max_response_length=8000", f"{TOKENS}=8192")
    sizes = HALF_BILLION
    found = [choose(*long, gib=gib, sizes=sizes).get(GRANULARITY) for gib in (90, 40, 30)]
    assert found == [None, "pointwise", "feed_forward"]
    whole = choose(*long, gib=30, sizes=sizes, recomputes_parts=False)
    assert not {ENABLE, GRANULARITY} & whole.keys()  # everything, as by default


def test_keys_of_the_user_stay() -> None:
    theirs = (f"{ENABLE}=True", f"{TOKENS}=16384", f"{WEIGHTS}=True", f"{MOMENTS}=False")
    assert choose(*theirs, gib=250) == {}
    assert choose(*theirs[:2], gib=139.8) == {MOMENTS: True}
    assert choose(f"{GRANULARITY}=pointwise", gib=1000) == {}
    counted = f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"
    assert TOKENS not in choose(counted, gib=139.8)


def test_what_does_not_fit_is_left_to_the_refusal() -> None:
    assert choose(gib=60) == {}


def test_generation_gets_less_only_where_nothing_else_fits_one_device() -> None:
    """7B on a card of 80 GB: 14 GiB of keys and values would not fit beside the sums."""
    found = choose(gib=79)
    assert found == {TOKENS: TWO_GROUPS, WEIGHTS: True, MOMENTS: True, CACHE: 0.3}
    assert CACHE not in choose(gib=85)
    assert choose(f"{CACHE}=0.5", gib=79) == {}, "the user's share stays"
    assert CACHE not in choose("trainer.n_gpus_per_node=2", gib=79)
    assert CACHE not in choose(gib=79, has_own_kernels=False)
    for name in ("vllm", "sglang", "hf"):
        assert CACHE not in choose(f"actor_rollout_ref.rollout.name={name}", gib=79)
    demanding = choose("data.max_response_length=400000", f"{TOKENS}=8192", gib=79)
    assert demanding.get(CACHE) is None, "the longest sequence needs more than the share leaves"


@pytest.mark.parametrize("gib", range(12, 140, 8))
def test_generation_gets_less_only_if_the_run_would_be_refused(gib: int) -> None:
    """Copies of small updates are expensive, and are preferred all the same."""
    small = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=4")
    for sizes in (HALF_BILLION, BILLIONS, SEVEN_BILLION):
        share = choose(*small, gib=gib, sizes=sizes).get(CACHE)
        if share is not None:
            assert choose(*small, f"{CACHE}=0.5", gib=gib, sizes=sizes) == {}


def test_a_chosen_share_has_room_for_weights_adapters_and_the_longest_sequence() -> None:
    adapters = (f"{MODEL}.lora_rank=256", f"{MODEL}.lora_alpha=256")
    for gib in range(20, 60):
        config = load_config(RunConfig, [*ARGUMENTS, *adapters]).config
        available = gib * GIB
        changed, keys = choose_memory(config, SEVEN_BILLION, available_bytes=available)
        if CACHE in keys:
            (plan,) = plan_memory(changed, SEVEN_BILLION, available_bytes=available).values()
            assert plan.cache >= 2 * SEVEN_BILLION.cache_numbers_per_token * (128 + 512)


def test_no_more_rests_on_the_host_than_it_has_room_for() -> None:
    """Weights and moments of 7B take 85 GiB, and moments alone 57."""
    everything = choose(gib=139.8)
    assert choose(gib=139.8, host_bytes=95 * GIB) == everything
    fewer = choose(gib=139.8, host_bytes=94 * GIB)
    assert fewer == {GRANULARITY: "feed_forward", MOMENTS: True}
    assert choose(gib=139.8, host_bytes=60 * GIB) == {}


def test_short_updates_do_not_wait_for_copies() -> None:
    """With 1280 tokens an update, copies would take longer than recomputing everything."""
    one = ("data.train_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=1")
    few = (*one, "actor_rollout_ref.rollout.n=2")
    keys = choose(*few, gib=31, sizes=HALF_BILLION)
    assert not {WEIGHTS, MOMENTS} & keys.keys()


def test_several_devices_recompute_no_more_than_they_must_and_offload_nothing() -> None:
    two, four, eight = (f"trainer.n_gpus_per_node={count}" for count in (2, 4, 8))
    assert choose(two, gib=139.8) == {GRANULARITY: "feed_forward", TOKENS: TWO_GROUPS}
    assert choose(four, gib=139.8) == {ENABLE: False, TOKENS: TWO_GROUPS}
    assert choose(eight, gib=1000) == {ENABLE: False}
    assert choose(two, gib=79) == {}
    assert choose(two, f"{ENABLE}=True", f"{TOKENS}=8192", gib=1000) == {}


def test_an_engine_that_fills_its_share_leaves_less_to_training() -> None:
    vllm = ("trainer.n_gpus_per_node=4", "actor_rollout_ref.rollout.name=vllm")
    share = "actor_rollout_ref.rollout.gpu_memory_utilization"
    expected = {
        0.3: {ENABLE: False, TOKENS: TWO_GROUPS},
        0.5: {GRANULARITY: "feed_forward"},
        0.6: {TOKENS: TWO_GROUPS},
    }
    for value, keys in expected.items():
        assert choose(*vllm, f"{share}={value}", gib=80, sizes=BILLIONS) == keys

    def of_generation(*arguments: str) -> int:
        config = load_config(RunConfig, [*ARGUMENTS, *arguments]).config
        (plan,) = plan_memory(config, BILLIONS, available_bytes=80 * GIB).values()
        return plan.rollout + plan.cache

    assert of_generation(*vllm, f"{share}=0.5") == 40 * GIB
    assert of_generation(vllm[1], f"{share}=0.5") == 40 * GIB
    frees = "actor_rollout_ref.rollout.free_cache_engine=True"
    assert of_generation(*vllm, f"{share}=0.5", frees) < 40 * GIB
    servers = "actor_rollout_ref.rollout.engine_kwargs.vllm.urls=[http://a:8000]"
    assert of_generation(*vllm, f"+{servers}") == 0


def test_a_pool_that_only_generates_does_not_hinder_the_trainer() -> None:
    apart = (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.async_pipeline=True",
        "trainer.generate_ahead_steps=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.9",
    )
    config = load_config(RunConfig, [*ARGUMENTS, "data.train_batch_size=2048", *apart]).config
    _, keys = choose_memory(config, HALF_BILLION, available_bytes=79 * GIB)
    assert keys == {ENABLE: False}


def test_several_devices_recompute_the_layers_of_a_model_whose_tower_is_trained() -> None:
    """The plan has no activations of the tower."""
    sizes = replace(HALF_BILLION, tower=600_000_000)
    four = "trainer.n_gpus_per_node=4"
    assert choose(four, gib=1000, sizes=sizes) == {GRANULARITY: "pointwise"}
    frozen = f"{ACTOR}.freeze_vision_tower=True"
    assert choose(four, frozen, gib=1000, sizes=sizes) == {ENABLE: False}
    assert choose(gib=1000, sizes=sizes) == {ENABLE: False}


def test_sequences_that_several_devices_share_allow_smaller_micro_batches() -> None:
    shared = (
        "trainer.n_gpus_per_node=8",
        f"{ACTOR}.ulysses_sequence_parallel_size=4",
        "data.max_response_length=32640",
        f"{TOKENS}=16384",
    )
    config = load_config(RunConfig, [*ARGUMENTS, *shared]).config
    lowered = load_config(RunConfig, [*ARGUMENTS, *shared[:3]]).config
    _, kept = choose_memory(config, HALF_BILLION, available_bytes=79 * GIB)
    _, free = choose_memory(lowered, SEVEN_BILLION, available_bytes=130 * GIB)
    assert TOKENS not in kept
    assert free.get(TOKENS) == 8192


def test_several_devices_choose_nothing_without_the_kernels_of_the_plan() -> None:
    assert choose("trainer.n_gpus_per_node=4", gib=1000, has_own_kernels=False) == {}
    assert choose(gib=1000, has_own_kernels=False) == {ENABLE: False}


def test_fine_tuning_has_keys_of_its_own() -> None:
    arguments = ("data.max_length=1024", "data.micro_batch_size_per_gpu=4", "model.path=m")
    config = load_config(SftConfig, arguments).config
    _, keys = choose_memory(config, SEVEN_BILLION, available_bytes=int(139.8 * GIB))
    assert keys == {"engine.optimizer_offload": True, "model.enable_gradient_checkpointing": False}


@pytest.mark.parametrize("key", [ENABLE, WEIGHTS])
def test_a_chosen_key_is_reported_only_if_it_changes(key: str) -> None:
    keys = choose(gib=139.8)
    default = load_config(RunConfig, ARGUMENTS).config
    value = {ENABLE: default.actor_rollout_ref.model.enable_gradient_checkpointing}.get(key, False)
    assert keys[key] != value
