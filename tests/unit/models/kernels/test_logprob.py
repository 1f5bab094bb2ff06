# SPDX-License-Identifier: Apache-2.0
"""The fused log-probs against torch's in fp64: values, gradients of hidden states and weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tandem.models.gradient_sum import GradientSum
from tandem.models.logprob import token_log_probs
from tandem.models.operators import TORCH

HIDDEN = 6
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def draw(num_rows: int, vocabulary: int, *, device: torch.device) -> list[Tensor]:
    """Return hidden states, weight and targets, which include the last and the first token."""
    target_R = torch.randint(vocabulary, (num_rows,))
    target_R[:2] = torch.tensor([vocabulary - 1, 0])[:num_rows]
    h_RD, weight_VD = torch.randn(num_rows, HIDDEN), torch.randn(vocabulary, HIDDEN)
    return [h_RD.to(device), weight_VD.to(device), target_R.to(device)]


def run(
    function, inputs: list[Tensor], *, temperature: float, weights_2R: Tensor
) -> tuple[Tensor, ...]:
    """Return log-probs, entropies and the gradients of their weighted sum."""
    h_RD, weight_VD, target_R = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (h_RD, weight_VD)]
    result = function(*leaves, target_R=target_R, temperature=temperature, with_entropy=True)
    loss = (weights_2R[0] * result.logp_R + weights_2R[1] * result.entropy_R).sum()
    return result.logp_R, result.entropy_R, *torch.autograd.grad(loss, leaves)


def check(fused, inputs: list[Tensor], *, temperature: float = 1.0) -> None:
    """Check that all results equal torch's in fp64."""
    weights_2R = torch.randn(2, len(inputs[2])).to(inputs[0].device)
    ours = run(fused.token_log_probs, inputs, temperature=temperature, weights_2R=weights_2R)
    double = [inputs[0].double(), inputs[1].double(), inputs[2]]
    theirs = run(token_log_probs, double, temperature=temperature, weights_2R=weights_2R.double())
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == torch.float32
        torch.testing.assert_close(our.double(), their, **CLOSE)


@pytest.mark.parametrize(
    ("num_rows", "vocabulary", "temperature"),
    [(1, 5, 1.0), (4, 8192, 0.7), (3, 8193, 1.0), (3, 20_011, 2.0)],
)
def test_equals_torch(num_rows, vocabulary, temperature, fused, device):
    check(fused, draw(num_rows, vocabulary, device=device), temperature=temperature)


@pytest.mark.parametrize("rows_of_a_chunk", [1, 2, 4])
def test_chunks_change_nothing(rows_of_a_chunk, fused, device, monkeypatch):
    chunk_bytes = rows_of_a_chunk * 4 * 37
    monkeypatch.setattr("tandem.models.kernels.logprob.CHUNK_BYTES", chunk_bytes)
    check(fused, draw(7, 37, device=device), temperature=0.9)


@pytest.mark.parametrize("kept_chunks", [1, 2, 9])
def test_kept_logits_change_no_bit(kept_chunks, fused, device, monkeypatch):
    """A second backward pass computes the logits again, which the first one has freed."""
    monkeypatch.setattr("tandem.models.kernels.logprob.CHUNK_BYTES", 2 * 4 * 37)
    h_RD, weight_VD, target_R = draw(7, 37, device=device)
    weights_2R = torch.randn(2, 7).to(device)

    def passes(number: int) -> list[Tensor]:
        monkeypatch.setattr("tandem.models.kernels.logprob.spare_chunks", lambda _: number)
        leaves = [x.detach().clone().requires_grad_() for x in (h_RD, weight_VD)]
        result = fused.token_log_probs(
            *leaves, target_R=target_R, temperature=0.7, with_entropy=True
        )
        loss = (weights_2R[0] * result.logp_R + weights_2R[1] * result.entropy_R).sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        return [result.logp_R, result.entropy_R, *first, *torch.autograd.grad(loss, leaves)]

    recomputed, kept = passes(0), passes(kept_chunks)
    assert all(map(torch.equal, kept, recomputed))


def test_kept_logits_give_way_when_memory_is_short(fused, device, monkeypatch):
    monkeypatch.setattr("tandem.models.kernels.logprob.CHUNK_BYTES", 2 * 4 * 37)
    monkeypatch.setattr("tandem.models.kernels.logprob.spare_chunks", lambda _: 9)
    computed = []

    def multiply(h_CD: Tensor, weight_VD: Tensor) -> Tensor:
        computed.append(len(h_CD))
        if len(computed) == 3:
            raise torch.OutOfMemoryError
        return fused.logits(h_CD, weight_VD)

    monkeypatch.setattr("tandem.models.kernels.logprob.logits", multiply)
    check(fused, draw(7, 37, device=device))
    # Four chunks, one of them twice, and all again in the backward pass: none was kept.
    assert len(computed) == 5 + 4


@pytest.mark.parametrize("rows_of_a_chunk", [2, 9])
@pytest.mark.parametrize("is_fused", [True, False])
def test_the_gradient_of_a_summed_weight_is_added_to_its_sum(
    rows_of_a_chunk, is_fused, fused, device, monkeypatch
):
    chunk_bytes = rows_of_a_chunk * 4 * 37
    monkeypatch.setattr("tandem.models.kernels.logprob.CHUNK_BYTES", chunk_bytes)
    operators = (
        fused
        if is_fused
        else replace(TORCH, token_log_probs=partial(token_log_probs, chunk_bytes=chunk_bytes))
    )
    inputs = draw(7, 37, device=device)
    weights_2R = torch.randn(2, 7).to(device)
    double = [inputs[0].double(), inputs[1].double(), inputs[2]]
    wanted = run(token_log_probs, double, temperature=0.9, weights_2R=weights_2R.double())[3]
    weight_VD = torch.nn.Parameter(inputs[1].clone())
    total = GradientSum(
        weight_VD,
        torch.float32,
        add_into=operators.add_into,
        add_product=operators.add_product,
    )
    total.begin()
    for _ in range(2):
        scores = operators.token_log_probs(
            inputs[0], weight_VD, target_R=inputs[2], temperature=0.9, with_entropy=True
        )
        (weights_2R[0] * scores.logp_R + weights_2R[1] * scores.entropy_R).sum().backward()
    assert weight_VD.grad is None
    torch.testing.assert_close(total.total.double(), 2 * wanted, **CLOSE)


def test_gradients_through_one_result_alone(fused, device):
    h_RD, weight_VD, target_R = draw(3, 11, device=device)
    for name in ("logp_R", "entropy_R"):
        grads = []
        for function, dtype in (
            (fused.token_log_probs, torch.float32),
            (token_log_probs, torch.float64),
        ):
            leaves = [x.detach().to(dtype).requires_grad_() for x in (h_RD, weight_VD)]
            scores = function(*leaves, target_R=target_R, temperature=1.5, with_entropy=True)
            grads.append(torch.autograd.grad(getattr(scores, name).sum(), leaves))
        for our, their in zip(*grads, strict=True):
            torch.testing.assert_close(our.double(), their, **CLOSE)


def test_frozen_weight_and_no_entropy(fused, device):
    h_RD, weight_VD, target_R = draw(3, 11, device=device)
    h_RD.requires_grad_()
    scores = fused.token_log_probs(
        h_RD, weight_VD, target_R=target_R, temperature=1.0, with_entropy=False
    )
    assert scores.entropy_R is None
    scores.logp_R.sum().backward()
    assert h_RD.grad is not None and weight_VD.grad is None


def test_logits_far_apart(fused, device):
    h_RD, weight_VD, target_R = draw(3, 11, device=device)
    check(fused, [300 * h_RD, weight_VD, target_R])


def test_half_precision_reduces_in_fp32(fused, device):
    h_RD, weight_VD, target_R = draw(4, 50, device=device)
    h_RD, weight_VD = h_RD.bfloat16(), weight_VD.bfloat16()
    ours = fused.token_log_probs(
        h_RD, weight_VD, target_R=target_R, temperature=1.0, with_entropy=True
    )
    theirs = token_log_probs(
        h_RD.double(), weight_VD.double(), target_R=target_R, temperature=1.0, with_entropy=True
    )
    for our, their in ((ours.logp_R, theirs.logp_R), (ours.entropy_R, theirs.entropy_R)):
        assert our.dtype == torch.float32
        # On a CPU the logits themselves are rounded to bf16.
        torch.testing.assert_close(our.double(), their, rtol=0, atol=5e-2)


def test_no_rows(fused, device):
    h_RD, weight_VD, target_R = draw(0, 11, device=device)
    h_RD.requires_grad_()
    scores = fused.token_log_probs(
        h_RD, weight_VD, target_R=target_R, temperature=1.0, with_entropy=True
    )
    scores.logp_R.sum().backward()
    assert scores.logp_R.shape == h_RD.grad.shape[:1] == (0,)
