# SPDX-License-Identifier: Apache-2.0
"""The memory plan against numbers counted by hand, and its remedies."""

from __future__ import annotations

import pytest

from tandem.config.memory import GIB, ModelSizes, plan_memory, require_memory
from tandem.config.overrides import load_config
from tandem.config.run import RunConfig
from tandem.errors import UserError

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


def test_parts_are_what_one_counts_by_hand() -> None:
    layer = 896 * (16 * 64) * 2 + 896 * (2 * 64) * 2 - 896 * 2 * 64 * 2 + 3 * 896 * 4864
    parameters = 24 * layer + 151936 * 896
    assert sizes().num_parameters == parameters
    plan = plan_memory(config(), sizes())
    assert plan.weights == plan.gradients == 6 * parameters
    assert plan.optimizer == 8 * parameters
    assert plan.reference == 0
    assert plan.cache == 2 * (2 * 24 * 2 * 64) * (64 * 128 + 512 * 512)
    kept = 6 * 896 + (3 * 14 + 3 * 2) * 64 + 3 * 4864
    assert plan.activations == 2 * 16384 * 24 * kept


def test_the_whole_is_near_what_was_measured() -> None:
    """One step of this run peaked at 38.2 GiB with micro-batches of 24576 tokens."""
    budget = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576"
    plan = plan_memory(config(budget), sizes())
    assert 38.2 <= plan.total / GIB <= 1.25 * 38.2


def test_checkpointing_and_a_reference_change_their_parts_only() -> None:
    plain = plan_memory(config(), sizes())
    recomputed = plan_memory(
        config("actor_rollout_ref.model.enable_gradient_checkpointing=True"), sizes()
    )
    assert recomputed.activations < plain.activations / 5
    with_reference = plan_memory(config("actor_rollout_ref.actor.use_kl_loss=True"), sizes())
    assert with_reference.reference == 2 * sizes().num_parameters


def test_an_offloaded_optimizer_takes_the_room_of_activations() -> None:
    offload = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True"
    assert plan_memory(config(offload), sizes()).optimizer == 0
    small = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=640"
    plan = plan_memory(config(offload, small), sizes())
    whole = plan_memory(config(small), sizes()).optimizer
    assert plan.optimizer == max(0, whole - plan.activations - plan.logits)


def test_a_run_that_fits_is_let_pass() -> None:
    assert plan_memory(config(), sizes()).total < 80 * GIB
    require_memory(config(), sizes(), available_bytes=80 * GIB)


def test_the_remedy_fits() -> None:
    available = 24 * GIB
    with pytest.raises(UserError, match=r"of 24 GiB\. Set (.*)\.$") as caught:
        require_memory(config(), sizes(), available_bytes=available)
    override = str(caught.value).split("Set ")[1].rstrip(".").split()
    require_memory(config(*override), sizes(), available_bytes=available)


def test_too_small_a_device_is_said_to_be() -> None:
    with pytest.raises(UserError, match="smaller model or a device with more memory"):
        require_memory(config(), sizes(), available_bytes=4 * GIB)


def test_sizes_that_are_not_said_are_not_guessed() -> None:
    assert ModelSizes.of({**HALF_BILLION, "hidden_size": None}) is None
    assert ModelSizes.of({}) is None
