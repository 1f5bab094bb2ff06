# SPDX-License-Identifier: Apache-2.0
"""Attention over long segments: what is computed by cuDNN, and how segments with prefixes become
its calls. The calls themselves need a GPU (tests/gpu/test_attention.py); here, torch's operators
stand in for them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.models.attention import PackedAttention
from tandem.models.operators import operators_for
from tandem.platforms.record import CPU as CPU_PLATFORM
from tandem.types import Segments
from tests.unit.models.tiny_models import pack_separate, pack_shared

PROMPTS = [[1] * 7, [1] * 4]
RESPONSES = [[[1] * 10, [1] * 3], [[1] * 17]]
CPU = torch.device("cpu")


@pytest.fixture
def dense(fused, monkeypatch):
    """Return the module under test, which pads to few rows."""
    module = pytest.importorskip("tandem.models.kernels.dense", reason="needs triton")
    monkeypatch.setattr(module, "_MULTIPLE", 4)
    return module


def causal(q_MHE: Tensor, k_MKE: Tensor, v_MKE: Tensor) -> Tensor:
    """Causal attention of rows that all have a key."""
    q, k, v = (x.transpose(0, 1) for x in (q_MHE, k_MKE, v_MKE))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return o.transpose(0, 1)


def forward(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The results, and three more."""
    return causal(*inputs), *(torch.tensor(float(i)) for i in range(3))


def backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    *,
    o_MHE: Tensor,
    others: tuple[Tensor, ...],
):
    """The gradients, with a check of what else the call is given."""
    assert [float(other) for other in others] == [0.0, 1.0, 2.0]
    assert o_MHE.shape == inputs[0].shape
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(causal(*leaves), leaves, grad)


@pytest.mark.parametrize("pack", [pack_shared, pack_separate])
def test_results_and_gradients_are_those_of_the_generic_attention(pack, dense, monkeypatch):
    monkeypatch.setattr(dense, "_MIN_MEAN_KEYS", 2)
    monkeypatch.setattr(dense, "forward", forward)
    monkeypatch.setattr(dense, "backward", backward)
    segments = pack(PROMPTS, RESPONSES).segments
    pieces = dense.pieces_of(segments)
    assert len(pieces) == len(segments.length_S)
    num_tokens = int(segments.length_S.sum())
    inputs = [torch.randn(num_tokens, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    leaves = [x.requires_grad_() for x in inputs]
    generic = PackedAttention(segments, CPU)
    grad_THE = torch.randn(num_tokens, 4, 8, dtype=torch.float64)
    found = dense.attend(*leaves[:2], v_YKE=leaves[2], pieces=pieces)
    expected = generic(0, *leaves)
    torch.testing.assert_close(found, expected)
    for our, their in zip(
        torch.autograd.grad(found, leaves, grad_THE),
        torch.autograd.grad(expected, leaves, grad_THE),
        strict=True,
    ):
        # The gradients of keys are added up in fp32.
        torch.testing.assert_close(our, their, rtol=1e-6, atol=1e-6)


def segments_of(*rows: tuple[int, int, int, int]) -> Segments:
    """Segments of starts, lengths, and starts and lengths of their prefixes."""
    return Segments(*torch.tensor(rows).T.contiguous())


@pytest.mark.parametrize(
    ("rows", "number"),
    [
        ([(0, 4096, 0, 0)], 1),
        ([(0, 512, 0, 0), (512, 4096, 0, 512), (4608, 4096, 0, 512)], 3),
        # Too short on average.
        ([(0, 4096, 0, 0), *((4096 + 100 * i, 100, 0, 0) for i in range(9))], 0),
        # Queries of zeros for a long prefix take more time than the mask of flash attention saves.
        ([(0, 8192, 0, 0), *((8192 + 64 * i, 64, 0, 8192) for i in range(9))], 0),
    ],
)
def test_only_long_segments_with_short_prefixes_are_computed_so(rows, number, dense):
    assert len(dense.pieces_of(segments_of(*rows))) == number


def test_only_devices_with_the_operator_use_it(fused):
    with_it = replace(CPU_PLATFORM, kernels="triton", has_dense_attention=lambda: True)
    without = replace(CPU_PLATFORM, kernels="triton")
    segments = segments_of((0, 4096, 0, 0))
    assert operators_for(with_it).packed_attention(segments, CPU)._pieces
    assert not operators_for(without).packed_attention(segments, CPU)._pieces


@pytest.mark.parametrize(
    ("head_dim", "dtype", "can"),
    [
        (128, torch.bfloat16, True),
        (64, torch.float16, True),
        (256, torch.bfloat16, False),
        (68, torch.bfloat16, False),
        (64, torch.float32, False),
    ],
)
def test_precisions_and_sizes_of_heads(head_dim, dtype, can, dense):
    assert dense.can_attend(torch.empty(2, 4, head_dim, dtype=dtype)) is can
