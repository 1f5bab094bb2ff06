# SPDX-License-Identifier: Apache-2.0
"""A decoder in fp8: near the decoder itself, read again after a change, and refused where it must.

The products are those of torch on a CPU. The kernels have tests of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.errors import UserError
from tandem.models.adapted import AdapterConfig
from tandem.models.decoder import Decoder
from tandem.models.quantized import QuantizedDecoder, require_quantizable
from tandem.models.quantized_operators import (
    FP8,
    QuantizedTokens,
    empty_weight,
    multiply,
    multiply_in_fp8,
    quantize_weight,
)
from tandem.types import Segments
from tests.fakes.tiny_decoder import CONFIG, tiny_decoder

NUM_TOKENS = 24
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.08}

ADAPTED = AdapterConfig(
    4,
    8.0,
    False,
    maps=(
        ("layers.0.qkv", (0, 2)),
        ("layers.0.gate_up", (1,)),
        ("layers.0.down", (0,)),
        ("layers.1.qkv", (0, 1, 2)),
        ("layers.1.gate_up", (0, 1)),
    ),
)


def _log_probs(decoder: Decoder, compute: Any) -> Tensor:
    none = torch.zeros(1, dtype=torch.int64)
    segments = Segments(none, torch.tensor([NUM_TOKENS]), none, none)
    attention = decoder.operators.packed_attention(segments, torch.device("cpu"))
    tokens = torch.arange(NUM_TOKENS) % decoder.config.vocab_size
    with torch.no_grad():
        h_TD = compute(tokens, torch.arange(NUM_TOKENS), attention)
        return decoder.operators.logits(h_TD, decoder.lm_head_weight).log_softmax(-1)


def _quantized(decoder: Decoder) -> QuantizedDecoder:
    quantized = QuantizedDecoder(decoder)
    quantized.update()
    return quantized


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True, "qkv_bias": False}], ids=["qwen2", "qwen3"]
)
def test_log_probs_are_near_those_of_the_decoder(changes: dict[str, Any]) -> None:
    decoder = tiny_decoder(**SIZES, **changes)
    exact, actual = _log_probs(decoder, decoder), _log_probs(decoder, _quantized(decoder))
    error = (actual - exact).abs()
    # e4m3 keeps four bits: each factor is off by a sixteenth at most, and their sums by less.
    assert 0 < error.mean() < 0.05
    assert error.max() < 0.4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adapters_have_their_effect_without_being_copied(dtype: torch.dtype) -> None:
    """Large ones change the log-probs by 0.5 on average, and fp8 changes them by 0.04."""
    decoder = tiny_decoder(**SIZES, adapters=ADAPTED).to(dtype)
    factors_b = [weight for name, weight in decoder.named_parameters() if name.endswith("lora_b")]
    quantized = _quantized(decoder)
    exact, actual = [], []
    for factor in (2.0, 0.0):
        with torch.no_grad():
            for weight in factors_b:
                weight.mul_(factor)
        exact.append(_log_probs(decoder, decoder))
        actual.append(_log_probs(decoder, quantized))
    effect = (exact[0] - exact[1]).abs().mean()
    for wanted, found in zip(exact, actual, strict=True):
        assert (found - wanted).abs().mean() < effect / 5


def test_adapters_in_fp16_are_added_to_numbers_of_its_range() -> None:
    """Products without the scales of the tokens exceed it: down adds large numbers of one sign."""
    decoder = tiny_decoder(**(SIZES | {"intermediate_size": 2048}), adapters=ADAPTED)
    with torch.no_grad():
        for layer in decoder.layers:
            for name in ("gate_up", "down"):
                layer.get_parameter(f"{name}.weight").abs_().mul_(10.0 if name == "down" else 1.0)
    decoder.half()
    exact, actual = _log_probs(decoder, decoder), _log_probs(decoder, _quantized(decoder))
    assert exact.isfinite().all()
    assert (actual - exact).abs().mean() < 0.05


@pytest.mark.parametrize("largest", [0.0, 0.001])
def test_small_matrices_in_fp16_are_quantized(largest: float) -> None:
    weight_NK = torch.tensor([[0.0, largest], [-largest, 0.0]], dtype=torch.float16)
    weight = empty_weight(weight_NK)
    quantize_weight(weight_NK, weight)
    found_NK = weight.values_NK.float() * weight.scale
    torch.testing.assert_close(found_NK, weight_NK.float(), rtol=2**-4, atol=0.0)


def test_products_on_the_host_are_those_of_torchs_operator() -> None:
    """But for the order of sums in fp32, which may move a result to the next number of bf16."""
    generator = torch.Generator().manual_seed(0)
    weight_NK = torch.randn(48, 32, generator=generator)
    weight = empty_weight(weight_NK)
    quantize_weight(weight_NK, weight)
    values_TK = torch.randn(5, 32, generator=generator).to(FP8)
    x = QuantizedTokens(values_TK, torch.ones(5))
    torch.testing.assert_close(
        multiply(x, weight).raw_TN, multiply_in_fp8(x, weight), rtol=2**-7, atol=1e-3
    )


def test_new_weights_are_read_after_outdate_and_in_place() -> None:
    decoder = tiny_decoder(**SIZES)
    quantized = _quantized(decoder)
    before = _log_probs(decoder, quantized)
    places = [own.down.values_NK.data_ptr() for own in quantized._layers]
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.mul_(1.5)
    quantized.update()  # nothing has been reported
    head_only = _log_probs(decoder, quantized)
    quantized.outdate()
    quantized.update()
    after = _log_probs(decoder, quantized)
    assert not torch.equal(after, before)
    assert not torch.equal(after, head_only)
    torch.testing.assert_close(after, _log_probs(decoder, _quantized(decoder)))
    assert places == [own.down.values_NK.data_ptr() for own in quantized._layers]


def test_copies_are_freed_and_made_again() -> None:
    decoder = tiny_decoder(**SIZES)
    quantized = _quantized(decoder)
    before = _log_probs(decoder, quantized)
    quantized.free()
    assert not quantized._layers
    quantized.update()
    torch.testing.assert_close(_log_probs(decoder, quantized), before)


@pytest.mark.parametrize("changes", [{"mlp_bias": True}, {"intermediate_size": 40}])
def test_other_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="actor_rollout_ref.rollout.quantization='fp8'"):
        require_quantizable(replace(CONFIG, **SIZES | changes))
