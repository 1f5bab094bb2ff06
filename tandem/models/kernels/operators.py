# SPDX-License-Identifier: Apache-2.0
"""The operators with the Triton kernels of this folder; the others are those of ``TORCH``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tandem.models.kernels.experts import PARTS, experts
from tandem.models.kernels.gate import gate
from tandem.models.kernels.head_norm import norm_heads
from tandem.models.kernels.logprob import logits, token_log_probs
from tandem.models.kernels.norm import add_norm
from tandem.models.kernels.quantized import TRITON_QUANTIZED
from tandem.models.kernels.rotary import rotate
from tandem.models.kernels.router import route
from tandem.models.kernels.sums import add_into, add_product
from tandem.models.kernels.varlen import VarlenAttention, VarlenRunAttention
from tandem.models.operators import TORCH

TRITON = replace(
    TORCH,
    add_norm=add_norm,
    norm_heads=norm_heads,
    rotate=rotate,
    gate=gate,
    packed_attention=VarlenAttention,
    attention_within=VarlenRunAttention,
    token_log_probs=token_log_probs,
    logits=logits,
    route=route,
    experts=experts,
    expert_parts=PARTS,
    add_into=add_into,
    add_product=add_product,
    quantized=TRITON_QUANTIZED,
)

TRITON_AND_DENSE = replace(
    TRITON, packed_attention=partial(VarlenAttention, has_dense_attention=True)
)
"""Those of a device with ``Platform.has_dense_attention``."""
