# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding and every scaling against transformers' own modules."""

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tandem.errors import UserError
from tandem.models.families import decoder_config
from tandem.models.operators import rotate
from tandem.models.rotary import LongRopeScaling, RopeConfig, Rotary
from tests.unit.models.tiny_models import (
    NATIVE,
    SIZES,
    hf_logits,
    open_fp32,
    pack_shared,
    sample_sequences,
    write_hf,
)

LONG = {**SIZES, "max_position_embeddings": 4096}
HEAD_DIM = SIZES["hidden_size"] // SIZES["num_attention_heads"]
SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn_all_options": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 8.0,
        "original_max_position_embeddings": 512,
        "attention_factor": 1.25,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 4000,
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}


def rotary_of(hf_config) -> Rotary:
    config = decoder_config(hf_config.to_dict())
    assert config is not None
    return Rotary(config.rope, config.head_dim)


@pytest.mark.parametrize("case", SCALINGS)
def test_scaling_equals_transformers(case):
    hf_config = LlamaConfig(**LONG, rope_parameters=dict(SCALINGS[case]))
    positions = torch.tensor([0, 1, 2, 17, 100, 999, 3999])
    generator = torch.Generator().manual_seed(0)
    q_THE = torch.randn(len(positions), 4, HEAD_DIM, generator=generator)
    theirs = LlamaRotaryEmbedding(hf_config)
    cos, sin = theirs(q_THE, positions[None])
    q_BHTE = q_THE.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(q_BHTE, q_BHTE, cos, sin)
    angles = rotary_of(hf_config).angles(positions, torch.float32)
    ours = rotate(q_THE, angles)
    torch.testing.assert_close(ours, expected[0].transpose(0, 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("hf_class", [Qwen2Config, Qwen3Config])
def test_logits_with_scaling_equal_transformers(case, hf_class, tmp_path):
    head_dim = {"head_dim": HEAD_DIM} if hf_class is Qwen3Config else {}
    hf_config = hf_class(**LONG, **head_dim, rope_parameters=dict(SCALINGS[case]))
    theirs = write_hf(hf_config, tmp_path)
    ours = open_fp32(tmp_path)
    assert ours.decoder is not None
    packed = pack_shared(*sample_sequences())
    with torch.no_grad():
        logits = ours.hidden(packed) @ ours.lm_head_weight.T
        assert (logits - hf_logits(theirs, packed)).abs().max() < 1e-5


@pytest.mark.parametrize(("case", "limit"), [("dynamic", 4096), ("longrope", 4000)])
def test_length_dependent_scaling_refuses_longer_sequences(case, limit):
    rotary = rotary_of(LlamaConfig(**LONG, rope_parameters=dict(SCALINGS[case])))
    rotary.require_length(limit)
    with pytest.raises(UserError, match=f"sequence length={limit + 1}.*up to {limit}"):
        rotary.require_length(limit + 1)


def test_angles_are_computed_in_fp32_also_for_bfloat16():
    rotary = rotary_of(NATIVE["llama"]())
    positions = torch.tensor([1001])
    exact = rotary.angles(positions, torch.float32)
    for ours, fp32 in zip(rotary.angles(positions, torch.bfloat16), exact, strict=True):
        assert torch.equal(ours, fp32.bfloat16())


def test_factors_of_another_number_than_the_frequencies_are_refused():
    config = RopeConfig(1e4, LongRopeScaling((1.0,), 1.0, 64))
    with pytest.raises(UserError, match=r"config.json: short_factor=\[1.0\]: must have 8 numbers"):
        Rotary(config, 16)
