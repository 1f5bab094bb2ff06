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
from tandem.types import Segments
from tests.fakes.tiny_decoder import CONFIG, tiny_decoder

NUM_TOKENS = 24
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.08}


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


ADAPTED = AdapterConfig(4, 8.0, False, maps=(("qkv", (0,)),))


@pytest.mark.parametrize(
    "changes", [{"mlp_bias": True}, {"intermediate_size": 40}, {"adapters": ADAPTED}]
)
def test_other_models_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="actor_rollout_ref.rollout.quantization='fp8'"):
        require_quantizable(replace(CONFIG, **SIZES | changes))
