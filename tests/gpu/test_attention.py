# SPDX-License-Identifier: Apache-2.0
"""Packed flash attention against the generic back end in fp64: results and gradients, prompts
shared by their responses or repeated.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.attention import PackedAttention, RunAttention
from tandem.models.kernels import dense
from tandem.models.kernels.varlen import VarlenAttention, VarlenRunAttention
from tandem.platforms.record import CUDA
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


@pytest.mark.parametrize("shared", [True, False])
def test_long_segments_equal_the_generic_back_end(machine: Machine, *, shared: bool) -> None:
    if machine.trial:
        pytest.skip("cuDNN has no interpreted form")
    prompts, responses = ([1] * 300,), ([[1] * 3000, [1] * 4000],)
    segments = (pack_shared if shared else pack_separate)(prompts, responses).segments
    if not CUDA.has_dense_attention():
        pytest.skip("the device has no such operator")
    assert dense.pieces_of(segments)
    num_tokens = int(segments.length_S.sum())
    qkv_TME = torch.randn(num_tokens, 4 + 2 * 2, 128).to(machine.device, torch.bfloat16)
    inputs = list(qkv_TME.split((4, 2, 2), 1))
    grad_THE = torch.randn(num_tokens, 4, 128).to(machine.device, torch.bfloat16)
    fused = VarlenAttention(segments, machine.device, has_dense_attention=True)
    ours = run(fused, inputs, grad_THE=grad_THE)
    theirs = run(
        PackedAttention(segments, machine.device),
        [x.double() for x in inputs],
        grad_THE=grad_THE.double(),
    )
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.bfloat16
        assert relative(our, their) < 0.01


def test_runs_of_patches_equal_the_generic_back_end(machine: Machine) -> None:
    lengths = np.array([64, 64, 48, 1024, 64, 4])
    dtype = torch.float32 if machine.trial else torch.bfloat16
    qkv_NME = torch.randn(int(lengths.sum()), 3 * 4, 80).to(machine.device, dtype)
    inputs = list(qkv_NME.split(4, 1))
    grad_NHE = torch.randn(len(qkv_NME), 4, 80).to(machine.device, dtype)

    def of(attend):
        return lambda layer, q, k, v: attend(q, k, v_NHE=v)

    fused = of(VarlenRunAttention(lengths, machine.device))
    generic = of(RunAttention(lengths, machine.device))
    ours = run(fused, inputs, grad_THE=grad_NHE)
    theirs = run(generic, [x.double() for x in inputs], grad_THE=grad_NHE.double())
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        assert relative(our, their) < 0.01
