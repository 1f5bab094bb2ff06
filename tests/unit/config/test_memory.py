# SPDX-License-Identifier: Apache-2.0
"""The memory plan against numbers counted by hand, and its remedies."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tandem.config.derived.sizes import CACHE_PAGE_TOKENS, OPTIMIZER_PART_NUMBERS, ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.plan.host_memory import resting_bytes
from tandem.config.plan.memory import GIB, MemoryPlan, plan_memory
from tandem.config.plan.memory_remedy import (
    narrow_cache,
    require_cache,
    require_host_memory,
    require_memory,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError
from tandem.rollout.paged.cache import PAGE_TOKENS
from tests.fakes.configured import IN_TURNS

HALF_BILLION = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
ARGUMENTS = (
    "data.train_batch_size=64",
    "data.max_prompt_length=128",
    "data.max_response_length=512",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=1024",
    "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
)


def sizes() -> ModelSizes:
    """Qwen2.5-0.5B's."""
    found = ModelSizes.of(HALF_BILLION)
    assert found is not None
    return found


def config(*arguments: str) -> RunConfig:
    """64 prompts x 8, prompt 128, response 512."""
    return load_config(RunConfig, [*ARGUMENTS, *arguments]).config


def one(*arguments: str) -> MemoryPlan:
    """The plan of a run's only pool."""
    (plan,) = plan_memory(config(*arguments), sizes()).values()
    return plan


def with_tower() -> ModelSizes:
    """A tower of 2 GiB in half precision."""
    return replace(sizes(), tower=GIB)


def test_a_frozen_tower_has_no_gradients_and_no_moments() -> None:
    frozen = config("actor_rollout_ref.actor.freeze_vision_tower=True")
    (with_frozen,) = plan_memory(frozen, with_tower()).values()
    (without,) = plan_memory(frozen, sizes()).values()
    half = 2 * GIB
    assert with_frozen == replace(
        without, weights=without.weights + half, reference=with_frozen.reference
    )


@pytest.mark.parametrize("rank", [0, 8])
def test_each_device_holds_a_frozen_tower_whole(rank: int) -> None:
    keys = (
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        "actor_rollout_ref.actor.freeze_vision_tower=True",
        f"actor_rollout_ref.model.lora_rank={rank}",
    )
    (with_frozen,) = plan_memory(config(*keys), with_tower()).values()
    (without,) = plan_memory(config(*keys), sizes()).values()
    assert with_frozen.weights - without.weights == 2 * GIB
    assert with_frozen.optimizer == without.optimizer


def test_tensor_parallelism_does_not_divide_a_tower() -> None:
    keys = (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.fsdp_config.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    )
    (seeing,) = plan_memory(config(*keys), with_tower()).values()
    (blind,) = plan_memory(config(*keys), sizes()).values()
    assert seeing.weights - blind.weights == 4 * GIB


def sft(*arguments: str) -> SftConfig:
    """Rows of 1024 tokens, 16 of them in a micro-batch."""
    fixed = ("data.max_length=1024", "data.micro_batch_size_per_gpu=16", "model.path=m")
    return load_config(SftConfig, [*fixed, *arguments]).config


def test_parts_are_what_one_counts_by_hand() -> None:
    layer = 896 * (16 * 64) * 2 + 896 * (2 * 64) * 2 - 896 * 2 * 64 * 2 + 3 * 896 * 4864
    parameters = 24 * layer + 151936 * 896
    assert sizes().num_parameters == parameters
    plan = one()
    assert plan.weights == 6 * parameters
    # Sums in fp32, and in bf16 the gradients of a layer and of the embedding.
    assert plan.gradients == 4 * parameters + 2 * (layer + 151936 * 896)
    assert plan.optimizer == 8 * parameters
    assert plan.reference == 0
    assert plan.cache == 2 * (2 * 24 * 2 * 64) * (64 * 128 + 512 * 512)
    kept = 6 * 896 + (3 * 14 + 3 * 2) * 64 + 3 * 4864
    assert plan.activations == 2 * 16384 * 24 * kept
    assert plan.gathered == plan.rollout == 0


def test_the_whole_is_near_what_was_measured() -> None:
    """One step of this run peaked at 38.2 GiB with micro-batches of 24576 tokens."""
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576"
    plan = one(budget)
    assert 38.2 <= plan.total / GIB <= 1.25 * 38.2


def test_checkpointing_and_a_reference_change_their_parts_only() -> None:
    plain = one()
    recomputed = one("actor_rollout_ref.model.enable_gradient_checkpointing=True")
    assert recomputed.activations < plain.activations / 5
    with_reference = one("actor_rollout_ref.actor.use_kl_loss=True")
    assert with_reference.reference == 2 * sizes().num_parameters


def test_the_more_is_recomputed_the_less_is_kept() -> None:
    model = "actor_rollout_ref.model"
    hidden, heads, inner = 896, (3 * 14 + 3 * 2) * 64, 4864
    whole = 6 * hidden + heads + 3 * inner
    for granularity, kept in (
        ("pointwise", 3 * hidden + heads + 2 * inner),
        ("feed_forward", 3 * hidden + heads),
        ("full", 3 * hidden),
    ):
        recomputed = f"{model}.enable_gradient_checkpointing=True"
        plan = one(recomputed, f"{model}.recompute_granularity={granularity}")
        assert plan.activations == 2 * 16384 * (24 * kept + whole)
        assert plan.activations < one().activations


def test_half_moments_take_half() -> None:
    half = "actor_rollout_ref.actor.optim.moments_dtype=bf16"
    assert one(half).optimizer * 2 == one().optimizer == 8 * sizes().num_parameters
    (alone,) = plan_memory(sft("optim.moments_dtype=bfloat16"), sizes()).values()
    assert alone.optimizer == 4 * sizes().num_parameters


def test_fp8_weights_of_generation_are_counted() -> None:
    fp8, share = "actor_rollout_ref.rollout.quantization=fp8", 1 << 30
    attention = 896 * (14 + 2 * 2) * 64
    copies = 24 * (attention + 3 * 896 * 4864)
    assert one(fp8).rollout - one().rollout == copies
    plans = (plan_memory(config(*x), sizes(), available_bytes=4 * share) for x in ([], [fp8]))
    caches = [plan.cache for (plan,) in (tuple(plans.values()) for plans in plans)]
    assert caches[0] - caches[1] == copies


def test_a_part_of_what_rests_visits_where_activations_have_been() -> None:
    offload, parameters = f"{LAYOUT}.param_offload=True", sizes().num_parameters
    plan = one(offload)
    assert (plan.weights, plan.gradients) == (2 * parameters, one().gradients)
    both = one(offload, f"{LAYOUT}.optimizer_offload=True", f"{LAYOUT}.model_dtype=float32")
    assert both.optimizer == 0
    rests = (offload, f"{LAYOUT}.optimizer_offload=True")
    small = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=640"
    tight = one(small, *rests)
    room = tight.activations + tight.logits
    assert tight.weights + tight.optimizer == (2 + 4 + 8) * parameters - room
    wide = replace(sizes(), num_layers=240)
    visiting = 3 * OPTIMIZER_PART_NUMBERS
    assert wide.visiting_parameters == visiting < wide.num_parameters
    (plan,) = plan_memory(config(small, *rests), wide).values()
    room = plan.activations + plan.logits
    assert plan.weights + plan.optimizer == 2 * wide.num_parameters + max(0, 12 * visiting - room)
    (whole,) = plan_memory(config(small, *rests, MUON), wide).values()
    assert whole.weights + whole.optimizer == 14 * wide.num_parameters - room
    shared = one(offload, f"{LAYOUT}.dtype=float32")
    assert shared.weights == 4 * parameters
    assert one(KL, f"{REF}.param_offload=True").reference == 0


def test_an_offloaded_optimizer_takes_the_room_of_activations() -> None:
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    assert one(offload).optimizer == 0
    small = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=640"
    plan = one(offload, small)
    whole = one(small).optimizer
    assert plan.optimizer == max(0, whole - plan.activations - plan.logits)


def test_a_run_that_fits_is_let_pass() -> None:
    assert one().total < 80 * GIB
    require_memory(config(), sizes(), available_bytes=80 * GIB)


def test_the_remedy_fits() -> None:
    available = 24 * GIB
    with pytest.raises(UserError, match=r"of 24 GiB\. Set (.*)\.$") as caught:
        require_memory(config(), sizes(), available_bytes=available)
    override = str(caught.value).split("Set ")[1].rstrip(".").split()
    require_memory(config(*override), sizes(), available_bytes=available)


def test_parts_of_layers_are_recomputed_only_by_models_that_can() -> None:
    long = config(
        "data.max_response_length=8000", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20000"
    )
    for in_parts, granularity in ((True, "feed_forward"), (False, "full")):
        with pytest.raises(UserError, match=rf"recompute_granularity={granularity}\.$"):
            require_memory(long, sizes(), available_bytes=38 * GIB, recomputes_parts=in_parts)


def test_too_small_a_device_is_said_to_be() -> None:
    with pytest.raises(UserError, match="smaller model, more devices or devices with more memory"):
        require_memory(config(), sizes(), available_bytes=4 * GIB)


def test_sizes_that_are_not_said_are_not_guessed() -> None:
    assert ModelSizes.of({**HALF_BILLION, "hidden_size": None}) is None
    assert ModelSizes.of({}) is None


MUON = "actor_rollout_ref.actor.optim.optimizer=Muon"
LAYOUT = "actor_rollout_ref.actor.fsdp_config"
REF = "actor_rollout_ref.ref.fsdp_config"
FOUR = "trainer.n_gpus_per_node=4"
KL = "actor_rollout_ref.actor.use_kl_loss=True"


def test_devices_that_shard_hold_their_share_and_gather_the_rest_for_a_moment() -> None:
    parameters = sizes().num_parameters
    plan = one(FOUR, KL)
    assert plan.weights == plan.gradients == 4 * (parameters // 4)
    assert plan.optimizer == 8 * (parameters // 4)
    assert plan.reference == 2 * (parameters // 4)
    assert plan.rollout == 2 * parameters
    embedding = 151936 * 896
    layer = (parameters - embedding) // 24
    assert plan.gathered == 2 * (embedding + 2 * layer) + 6 * embedding
    assert plan.cache == one().cache // 4
    assert plan.activations == one().activations
    kept = one(FOUR, f"{LAYOUT}.reshard_after_forward=False")
    assert kept.gathered == (2 + 4) * parameters + 2 * embedding


def test_shard_groups_and_split_matrices_decide_the_share() -> None:
    parameters = sizes().num_parameters
    assert one(FOUR, f"{LAYOUT}.fsdp_size=2").weights == 4 * (parameters // 2)
    split = one(FOUR, f"{LAYOUT}.tensor_model_parallel_size=2")
    assert split.weights == 4 * (parameters // 4)
    assert split.gathered < one(FOUR).gathered
    assert split.activations < one(FOUR).activations
    by_count = "actor_rollout_ref.actor.use_dynamic_bsz=False"
    four = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", by_count)
    sequence = one(FOUR, *four, "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2")
    assert sequence.activations == one(FOUR, *four).activations // 2


def test_what_rests_on_the_host_leaves_the_device() -> None:
    assert one(FOUR, KL, f"{REF}.param_offload=True").reference == 0
    plan = one(FOUR, f"{LAYOUT}.offload_policy=True")
    assert plan.weights == plan.gradients == plan.optimizer == 0
    offload, wide = f"{LAYOUT}.optimizer_offload=True", replace(sizes(), num_layers=2400)
    actor, model = "actor_rollout_ref.actor", "actor_rollout_ref.model"
    small = f"{actor}.ppo_max_token_len_per_gpu=640", f"{model}.enable_gradient_checkpointing=True"
    (in_parts,) = plan_memory(config(FOUR, offload, *small), wide).values()
    room = in_parts.activations + in_parts.logits
    assert in_parts.optimizer == max(0, 8 * wide.visiting_parameters - room)
    (whole,) = plan_memory(config(FOUR, offload, *small, MUON), wide).values()
    assert whole.optimizer == 2 * whole.weights - room > in_parts.optimizer
    assert plan.gathered == one(FOUR).gathered
    # They come back for training, while the cache stays where it is.
    assert one(FOUR, f"{LAYOUT}.param_offload=True").weights == one(FOUR).weights


def test_what_rests_on_the_host_is_counted_there() -> None:
    """Weights and moments are fp32, gradients too; a reference has the precision of passes."""
    numbers = sizes().num_parameters
    weights, moments = (f"{LAYOUT}.{name}_offload=True" for name in ("param", "optimizer"))
    assert one().host == 0
    assert one(weights).host == 4 * numbers
    assert one(weights, moments).host == 12 * numbers
    alone = one(weights, f"{LAYOUT}.dtype=float32")
    assert alone.host == 0, "passes use the weights themselves"
    halves = one(moments, "actor_rollout_ref.actor.optim.moments_dtype=bfloat16")
    assert halves.host == 4 * numbers
    assert halves.total == int(sum(asdict(replace(halves, host=0)).values()) * 1.1)
    *_, total, on_host = halves.to_gib().items()
    assert total == ("total", round(halves.total / GIB, 2)), "what is on the host comes after it"
    assert on_host == ("host", round(halves.host / GIB, 2))
    assert one(KL, f"{REF}.param_offload=True").host == 2 * numbers
    held = one(FOUR).weights // 4
    assert one(FOUR, moments).host == 8 * held
    assert one(FOUR, weights, moments).host == 12 * held
    supervised = load_config(SftConfig, ["trainer.n_gpus_per_node=4", "engine.param_offload=True"])
    (plan,) = plan_memory(supervised.config, sizes()).values()
    assert plan.host == 0, "every step of sft uses the weights"
    assert one(FOUR, moments, MUON).host == 4 * held, "one moment of matrices, at least"
    assert one(FOUR, f"{LAYOUT}.offload_policy=True", moments).host == 16 * held
    assert one(FOUR, KL, f"{REF}.param_offload=True").host == one(FOUR, KL).reference


def test_stages_of_unequal_size_rest_on_the_host_as_they_are() -> None:
    """Of four stages, the first and the last have a large matrix of the vocabulary."""
    stages = (f"{LAYOUT}.pipeline_model_parallel_size=4", f"{LAYOUT}.fsdp_size=1")
    untied = replace(sizes(), tied=False)
    run = config(FOUR, *stages, f"{LAYOUT}.optimizer_offload=True")
    (plan,) = plan_memory(run, untied).values()
    assert 4 * plan.host == pytest.approx(8 * untied.num_parameters, rel=1e-6)
    assert plan.weights > untied.num_parameters, "the largest stage has more than a quarter"


def test_all_devices_of_a_node_share_its_memory() -> None:
    moments = f"{LAYOUT}.optimizer_offload=True"
    for nodes in (1, 2):
        run = config(f"trainer.nnodes={nodes}", "trainer.n_gpus_per_node=4", moments)
        plans = plan_memory(run, sizes())
        (plan,) = plans.values()
        assert resting_bytes(run, plans) == 4 * plan.host == 8 * 4 * (plan.weights // 4)


def test_a_host_that_is_too_small_is_said_to_be_with_keys_that_fit() -> None:
    weights, moments = (f"{LAYOUT}.{name}_offload" for name in ("param", "optimizer"))
    run = config(f"{weights}=True", f"{moments}=True")

    def refusal(host_gib: float, *, device_gib: int = 80) -> str:
        with pytest.raises(UserError) as caught:
            require_host_memory(
                run, sizes(), available_bytes=device_gib * GIB, host_bytes=int(host_gib * GIB)
            )
        return str(caught.value)

    needed = 12 * sizes().num_parameters / GIB
    require_host_memory(
        run, sizes(), available_bytes=80 * GIB, host_bytes=int(needed / 0.9 * GIB) + 2
    )
    assert f"what offloading keeps there ({needed:.0f} GiB)" in refusal(needed)
    assert refusal(needed).endswith(f"Set {weights}=False.")
    assert refusal(3).endswith(f"Set {moments}=False.")
    assert refusal(1).endswith(f"Set {weights}=False {moments}=False.")
    assert refusal(1, device_gib=20).endswith("Use a host with 7 GiB, or more nodes.")


def test_a_remedy_turns_off_as_few_offloads_as_fit() -> None:
    """``optimizer_offload`` counts only once ``offload_policy`` is off."""
    keys = [f"{LAYOUT}.{name}" for name in ("optimizer_offload", "offload_policy")]
    run = config(FOUR, *(f"{key}=True" for key in keys))
    both = rf"Set {keys[0]}=False {keys[1]}=False\.$"
    with pytest.raises(UserError, match=both):
        require_host_memory(run, sizes(), available_bytes=80 * GIB, host_bytes=3 * GIB)
    three = [f"{LAYOUT}.param_offload", f"{LAYOUT}.optimizer_offload", f"{REF}.param_offload"]

    def device_bytes(*off: str) -> int:
        return one(KL, *(f"{key}={key not in off}" for key in three)).total

    pair, every = device_bytes(*three[1:]), device_bytes(*three)
    assert pair < every
    run = config(KL, *(f"{key}=True" for key in three))
    with pytest.raises(UserError, match=rf"Set {three[1]}=False {three[2]}=False\.$"):
        require_host_memory(
            run, sizes(), available_bytes=(pair + every) // 2, host_bytes=int(2.5 * GIB)
        )


def test_a_reference_that_rests_on_a_small_host_has_a_remedy_of_its_own() -> None:
    run = config(KL, f"{REF}.param_offload=True")
    with pytest.raises(UserError, match=rf"Set {REF}\.param_offload=False\.$"):
        require_host_memory(run, sizes(), available_bytes=80 * GIB, host_bytes=GIB // 2)


def test_a_remedy_for_devices_fits_the_host_or_says_what_host_it_needs() -> None:
    large = replace(sizes(), num_layers=300)
    offloads = r"Set .*param_offload=True \S*optimizer_offload=True\.$"
    small = r"On a host with \d+ GiB, set .*optimizer_offload=True\. This host has 10 GiB\.$"
    for host_bytes, remedy in ((None, offloads), (1000 * GIB, offloads), (10 * GIB, small)):
        with pytest.raises(UserError, match=remedy):
            require_memory(config(), large, available_bytes=90 * GIB, host_bytes=host_bytes)


def test_what_generates_in_turns_with_training_keeps_its_cache_with_every_batch_begun() -> None:
    freed = "actor_rollout_ref.rollout.free_cache_engine=True"
    in_step = one(FOUR, freed)
    assert in_step.cache + in_step.rollout < one(FOUR).cache + one(FOUR).rollout
    in_turns = one(FOUR, freed, *IN_TURNS)
    assert in_turns.rollout == one(FOUR).rollout
    assert in_turns.cache == 2 * one(FOUR).cache
    assert one(*IN_TURNS).cache == 2 * one().cache


@pytest.mark.parametrize("devices", [(), (FOUR,)])
def test_in_turns_a_smaller_cache_makes_room_first(devices: tuple[str, ...]) -> None:
    many = ("data.train_batch_size=4096", "actor_rollout_ref.rollout.max_num_seqs=4096")
    keys = (*devices, *IN_TURNS, *many)
    training = one(*keys)
    left = training.total - training.cache
    available = int(left / 0.65)
    with pytest.raises(
        UserError, match=r"Set actor_rollout_ref.rollout.gpu_memory_utilization=0.3"
    ):
        require_memory(config(*keys), sizes(), available_bytes=available)
    smaller = config(*keys, "actor_rollout_ref.rollout.gpu_memory_utilization=0.3")
    require_memory(smaller, sizes(), available_bytes=available)
    require_cache(smaller, sizes(), available_bytes=available)


def test_each_pool_holds_what_its_tasks_need() -> None:
    split = (
        "trainer.separated_node_tasks=[logp,actor-train,ref_logp,generate]",
        "trainer.separated_node_ratios=[0.125,0.5,0.125,0.25]",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        KL,
    )
    plans = plan_memory(config(*split), sizes())
    assert list(plans) == ["logp", "actor-train", "ref_logp", "generate"]
    parameters = sizes().num_parameters
    trained, generating = plans["actor-train"], plans["generate"]
    assert trained.weights == 4 * (parameters // 4)
    assert trained.cache == trained.rollout == trained.reference == 0
    assert generating.rollout == 2 * parameters
    assert generating.cache == one().cache // 2
    assert generating.optimizer == generating.activations == generating.logits == 0
    assert plans["ref_logp"].reference == plans["logp"].weights == 2 * parameters
    assert plans["logp"].activations == 2 * 16384 * sizes().layer_numbers_per_token()


def test_a_policy_that_scores_with_the_weights_that_generate_holds_no_others() -> None:
    split = (
        "trainer.separated_node_tasks=[actor-train,[logp,generate]]",
        "trainer.separated_node_ratios=[0.5,0.5]",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
    )
    plan = plan_memory(config(*split), sizes())["logp+generate"]
    assert plan.weights == plan.gathered == 0
    assert plan.rollout == 2 * sizes().num_parameters
    assert plan.activations > 0


def test_the_fullest_pool_is_named_and_the_remedy_fits_every_pool() -> None:
    for available in (20 * GIB, 9 * GIB):
        with pytest.raises(UserError, match=r"memory: a device of actor-train.* Set ") as caught:
            require_memory(config(FOUR), sizes(), available_bytes=available)
        override = str(caught.value).split("Set ")[1].rstrip(".").split()
        require_memory(config(FOUR, *override), sizes(), available_bytes=available)


def test_supervised_runs_are_counted_as_training_is() -> None:
    (alone,) = plan_memory(sft(), sizes()).values()
    parameters = sizes().num_parameters
    assert alone.weights == 6 * parameters
    assert alone.gradients == one().gradients
    assert alone.optimizer == 8 * parameters
    assert alone.cache == alone.reference == alone.rollout == 0
    kept = sizes().kept_numbers_per_token("full")
    assert alone.activations == 2 * 16 * 1024 * kept
    (shared,) = plan_memory(sft("trainer.n_gpus_per_node=8"), sizes()).values()
    assert shared.optimizer == 8 * (parameters // 8)
    assert shared.activations == alone.activations


def test_the_remedy_of_a_supervised_run_fits() -> None:
    wide = sft("model.enable_gradient_checkpointing=False")
    require_memory(wide, sizes(), available_bytes=80 * GIB)
    with pytest.raises(
        UserError, match=r"this run needs about .* Set data\.use_dynamic_bsz"
    ) as caught:
        require_memory(wide, sizes(), available_bytes=20 * GIB)
    override = str(caught.value).split("Set ")[1].rstrip(".").split()
    changed = sft("model.enable_gradient_checkpointing=False", *override)
    require_memory(changed, sizes(), available_bytes=20 * GIB)


def test_a_cache_that_cannot_hold_the_longest_sequence_is_refused_with_a_share_that_fits() -> None:
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    long = ("data.max_prompt_length=30000", "data.max_response_length=512")
    with pytest.raises(UserError, match=rf"^{key}=0\.01: .*30000.* Set {key}=0\.02\.$"):
        require_cache(config(*long, f"{key}=0.01"), sizes(), available_bytes=80 * GIB)
    require_cache(config(*long, f"{key}=0.02"), sizes(), available_bytes=80 * GIB)
    with pytest.raises(UserError, match=r"Shorten the sequences\.$"):
        require_cache(config("data.max_response_length=200000"), sizes(), available_bytes=3 * GIB)


def test_a_cache_for_a_part_of_the_sequences_is_told_with_a_share_for_all() -> None:
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    many = ("data.train_batch_size=4096", "actor_rollout_ref.rollout.max_num_seqs=4096")
    assert narrow_cache(config(f"{key}=0.5"), sizes(), available_bytes=80 * GIB) is None
    note = narrow_cache(config(*many, f"{key}=0.1"), sizes(), available_bytes=200 * GIB)
    assert note is not None and note.startswith(f"{key}=0.1 holds the keys and values of ")
    larger = note.split("Set ")[1].split()[0]
    assert narrow_cache(config(*many, larger), sizes(), available_bytes=200 * GIB) is None
    tight = narrow_cache(config(*many, f"{key}=0.1"), sizes(), available_bytes=30 * GIB)
    assert tight is not None and "Set" not in tight


def test_the_cache_hands_out_pages_of_the_size_that_is_reckoned_with() -> None:
    assert CACHE_PAGE_TOKENS == PAGE_TOKENS


def test_a_stage_holds_its_layers_and_the_activations_of_several_micro_batches() -> None:
    keys = ("trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1")
    whole = one(*keys)
    staged = one(*keys, "actor_rollout_ref.actor.fsdp_config.pipeline_model_parallel_size=4")
    layers = sizes().num_parameters - sizes().embedding_parameters
    assert staged.weights == 4 * (layers // 4 + sizes().embedding_parameters)
    assert staged.weights < whole.weights
    assert staged.activations == whole.activations, "4 micro-batches of a quarter of the layers"
    uneven = one(
        *keys,
        "actor_rollout_ref.actor.fsdp_config.pipeline_model_parallel_size=4",
        "actor_rollout_ref.actor.fsdp_config.num_layers_in_last_pipeline_stage=12",
    )
    assert uneven.weights == 4 * (layers // 2 + sizes().embedding_parameters)
