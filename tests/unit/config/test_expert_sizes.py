# SPDX-License-Identifier: Apache-2.0
"""Sizes, flops and memory of models with experts (MO14)."""

from __future__ import annotations

from math import prod

import pytest

from tandem.config.derived.experts import experts_of
from tandem.config.derived.sizes import ModelSizes
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import plan_memory
from tandem.config.schema.run import RunConfig
from tandem.metrics.throughput import matmul_parameters, training_flops
from tandem.models.decoder import parameter_shapes
from tandem.models.families import decoder_config

A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
DOTS = A3B | {
    "model_type": "dots1",
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
V3 = _LATENT | {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}
MOONLIGHT = _LATENT | {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "max_position_embeddings": 8192,
}
V2_LITE = MOONLIGHT | {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "intermediate_size": 10944,
    "topk_method": "greedy",
}


def exact(hf_config) -> int:
    return sum(map(prod, parameter_shapes(decoder_config(hf_config)).values()))


def test_checkpoints_of_earlier_versions_belong_to_the_same_experts():
    """Checkpoints hash this text: a further field must not change it."""
    assert repr(experts_of(A3B)) == (
        "ExpertConfig(num_experts=128, num_chosen=8, inner=768, dense_layers=(), "
        "scoring='softmax', is_renormalized=True, scale=1.0, num_groups=1, num_kept_groups=1, "
        "has_correction=False, shared_inner=0, has_shared_gate=False, num_ignored_layers=0)"
    )


def test_mo14_parameters_of_qwen3_30b_a3b():
    assert exact(A3B) == 30_532_122_624
    assert ModelSizes.of(A3B).num_parameters == pytest.approx(30_532_122_624, rel=1e-4)


@pytest.mark.parametrize(
    ("hf_config", "number"),
    [(V3, 671_026_419_200), (MOONLIGHT, 15_960_110_208), (V2_LITE, 15_706_484_224)],
)
def test_mo14_parameters_of_models_with_latent_attention(hf_config, number):
    assert exact(hf_config) == number
    assert ModelSizes.of(hf_config).num_parameters == pytest.approx(number, rel=1e-4)


def test_mo14_latent_attention_caches_the_keys_and_values_of_all_heads():
    """The rollout keeps them for each head, padded to the width of the keys, 128 + 64."""
    assert ModelSizes.of(MOONLIGHT).cache_numbers_per_token == 2 * 27 * 16 * 192


def test_mo14_flops_of_latent_attention_are_verls_formula():
    """verl counts each map of attention, and squares with the width of queries and keys."""
    hidden, heads = 7168, 128
    attention = hidden * 1536 + 1536 * heads * 192 + hidden * (512 + 64)
    attention += heads * (128 + 128) * 512 + heads * 128 * hidden
    sparse = hidden * 256 + 3 * hidden * 2048 * (8 + 1) + attention
    dense = 3 * hidden * 18432 + attention
    products = 58 * sparse + 3 * dense + 2 * 129280 * hidden
    sizes = ModelSizes.of(V3)
    assert matmul_parameters(sizes) == products
    assert training_flops(sizes, [10]) == 6 * products * 10 + 6 * 61 * heads * 192 * 100


@pytest.mark.parametrize("hf_config", [A3B, DOTS, V3, V2_LITE])
def test_mo14_sizes_count_all_but_norms_and_corrections(hf_config):
    shapes = parameter_shapes(decoder_config(hf_config))
    matrices = sum(prod(shape) for shape in shapes.values() if len(shape) > 1)
    assert ModelSizes.of(hf_config).num_parameters == matrices


def test_mo14_flops_are_verls_formula():
    """verl counts D F K 3 + D E for the feed-forward of each layer, and 2 V D."""
    hidden, heads = 2048, 2 * (32 + 4) * 128
    layer = hidden * heads + hidden * 768 * 8 * 3 + hidden * 128
    assert matmul_parameters(ModelSizes.of(A3B)) == 48 * layer + 2 * 151936 * hidden


def test_mo14_kept_activations_of_layers_with_experts():
    sizes = ModelSizes.of(DOTS)
    outside = 6 * 2048 + 3 * (32 + 4) * 128
    routing = 2 * 128 + 14 * 8  # scores, and what was chosen
    sparse = outside + 8 * (4 * 2048 + 4 * 768) + routing + 4 * 2 * 768
    dense = outside + 3 * 6144
    assert sizes.layer_numbers_per_token() == sparse
    # Of a chosen expert, its gate and up are kept. One layer at a time has the rest.
    of_experts = 8 * (4 * 2048 + 4 * 768)
    kept = sparse - of_experts + 8 * 2 * 768
    assert sizes.kept_numbers_per_token(None) == 3 * kept + dense + sparse - kept
    assert sizes.kept_numbers_per_token("full") == 4 * 3 * 2048 + sparse
    # If experts are divided, the fullest device has more tokens than the others.
    fullest = sparse + of_experts // 2
    assert sizes.layer_numbers_per_token(expert_parallel=2) == fullest
    assert sizes.kept_numbers_per_token("full", expert_parallel=2) == 4 * 3 * 2048 + fullest
    # What is sent to the experts of other devices is kept, too.
    sent = 8 * (2048 + 2 * 768) * 3 // 2
    apart = sparse - of_experts + sent
    divided = sizes.kept_numbers_per_token(None, expert_parallel=2)
    assert divided == 3 * apart + dense + fullest - apart
    heads = 3 * (32 + 4) * 128
    pointwise = 4 * (3 * 2048 + heads) + 2 * 6144 + sparse
    pointwise += 3 * (2 * 2048 + kept - outside)
    assert sizes.kept_numbers_per_token("pointwise") == pointwise
    assert sizes.kept_numbers_per_token("feed_forward") == 4 * (3 * 2048 + heads) + sparse


def test_mo14_divided_experts_are_held_and_gathered_in_parts():
    words = ["trainer.n_gpus_per_node=8", "trainer.device=cuda"]
    key = "actor_rollout_ref.actor.fsdp_config.expert_model_parallel_size"
    sizes = ModelSizes.of(A3B)

    def of(divided: int):
        loaded = load_config(RunConfig, [*words, f"{key}={divided}"])
        (plan,) = plan_memory(loaded.config, sizes).values()
        return plan

    one, eight = of(1), of(8)
    assert one.weights == eight.weights == pytest.approx(4 * 30_532_122_624 / 8, rel=1e-3)
    # Two layers are gathered at once, in bf16. The largest gradient becomes that of the embedding.
    routed = 3 * 2048 * 768 * 128
    assert one.gathered - eight.gathered >= 2 * 2 * routed * 7 // 8


@pytest.mark.parametrize(
    ("words", "routed"),
    [
        ((), 8),
        (("rollout.expert_parallel_size=8",), 1),
        (("rollout.expert_parallel_size=2",), 4),
        # Experts that training and generation divide alike, in one precision, have one storage.
        (("rollout.expert_parallel_size=8", "actor.fsdp_config.expert_model_parallel_size=8"), 1),
        (
            (
                "rollout.expert_parallel_size=8",
                "actor.fsdp_config.expert_model_parallel_size=8",
                "actor.fsdp_config.model_dtype=bfloat16",
            ),
            0,
        ),
        (
            (
                "rollout.expert_parallel_size=4",
                "actor.fsdp_config.expert_model_parallel_size=4",
                "actor.fsdp_config.model_dtype=bfloat16",
            ),
            2,
        ),
    ],
)
def test_mo14_generation_holds_its_part_of_the_experts(words, routed):
    """``routed`` is the number of eighths of all experts."""
    sizes = ModelSizes.of(A3B)
    words = [f"actor_rollout_ref.{word}" for word in words]
    words += ["trainer.n_gpus_per_node=8", "trainer.device=cuda"]
    (plan,) = plan_memory(load_config(RunConfig, words).config, sizes).values()
    experts = 48 * 3 * 2048 * 768 * 128
    assert plan.rollout == 2 * (sizes.num_parameters - experts + experts * routed // 8)
