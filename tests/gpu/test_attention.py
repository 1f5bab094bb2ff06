# SPDX-License-Identifier: Apache-2.0
"""Packed flash attention against the generic back end in fp64: results and gradients, prompts
shared by their responses or repeated.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.attention import PackedAttention
from tandem.models.kernels.varlen import VarlenAttention
from tandem.types import Segments
from tests.gpu.machine import Machine
from tests.unit.models.tiny_models import pack_separate, pack_shared

PROMPTS = (1, 63, 130, 64, 300)
RESPONSES = ((5, 1), (64, 65, 1, 100), (300,), (2, 2), (17, 33, 257))


def segments_of(*, shared: bool) -> Segments:
    """Prompts of ``PROMPTS`` tokens with their ``RESPONSES``."""
    prompts = [[1] * length for length in PROMPTS]
    responses = [[[1] * length for length in group] for group in RESPONSES]
    return (pack_shared if shared else pack_separate)(prompts, responses).segments


def run(attention, inputs: list[Tensor], *, grad_THE: Tensor) -> tuple[Tensor, ...]:
    """The result and the gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    o_THE = attention(0, *leaves)
    return o_THE.detach(), *torch.autograd.grad(o_THE, leaves, grad_THE)


def relative(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference by norm."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(14, 2, 64), (4, 4, 64), (8, 1, 128)])
def test_equals_the_generic_back_end(
    heads: int, kv_heads: int, head_dim: int, *, shared: bool, machine: Machine
) -> None:
    segments = segments_of(shared=shared)
    num_tokens = int(segments.length_S.sum())
    dtype = torch.float32 if machine.trial else torch.bfloat16
    q_THE, k_TKE, v_TKE, grad_THE = (
        torch.randn(num_tokens, count, head_dim).to(machine.device, dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    )
    fused = VarlenAttention(segments, machine.device)
    generic = PackedAttention(segments, machine.device)
    ours = run(fused, [q_THE, k_TKE, v_TKE], grad_THE=grad_THE)
    theirs = run(
        generic,
        [q_THE.double(), k_TKE.double(), v_TKE.double()],
        grad_THE=grad_THE.double(),
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        assert relative(our, their) < 0.01


def test_slices_of_one_tensor_as_in_the_decoder(machine: Machine) -> None:
    segments = segments_of(shared=True)
    num_tokens = int(segments.length_S.sum())
    dtype = torch.float32 if machine.trial else torch.bfloat16
    qkv_TME = torch.randn(num_tokens, 4 + 2 * 2, 64).to(machine.device, dtype)
    slices = list(qkv_TME.split((4, 2, 2), 1))
    grad_THE = torch.randn(num_tokens, 4, 64).to(machine.device, dtype)
    fused = VarlenAttention(segments, machine.device)
    strided = run(fused, slices, grad_THE=grad_THE)
    compact = run(fused, [x.contiguous() for x in slices], grad_THE=grad_THE.clone())
    for our, their in zip(strided, compact, strict=True):
        assert relative(our, their.double()) < 0.005
