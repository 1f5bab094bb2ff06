# SPDX-License-Identifier: Apache-2.0
"""Fused log-probs and entropies against the plain formula."""

import pytest
import torch

from tandem.models.logprob import squared_probabilities, token_log_probs

ROWS, HIDDEN, VOCAB = 23, 12, 31
ONE_CHUNK, FIVE_ROWS = 1 << 20, 5 * VOCAB * 4
NUM_CHECKED = 7
"""Rows whose derivatives are checked: two chunks of them."""


def inputs(dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    h_RD = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(VOCAB, HIDDEN, generator=generator) / 2
    weight_VD = weight_VD.to(dtype).requires_grad_()
    return h_RD, weight_VD, torch.randint(VOCAB, (ROWS,), generator=generator)


def plain(h_RD, weight_VD, target_R, temperature):
    log_softmax_RV = torch.log_softmax((h_RD @ weight_VD.T).float() / temperature, -1)
    logp_R = log_softmax_RV.gather(1, target_R[:, None])[:, 0]
    return logp_R, -(log_softmax_RV.exp() * log_softmax_RV).sum(-1)


def weights():
    return torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, FIVE_ROWS, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk_bytes, temperature):
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(
        h_RD,
        weight_VD,
        target_R=target_R,
        temperature=temperature,
        with_entropy=True,
        chunk_bytes=chunk_bytes,
    )
    logp_R, entropy_R = plain(h_RD, weight_VD, target_R, temperature)
    torch.testing.assert_close(ours.logp_R, logp_R, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.entropy_R, entropy_R, rtol=1e-6, atol=1e-6)
    a, b = weights()
    our_loss = (a * ours.logp_R + b * ours.entropy_R).sum()
    our_grads = torch.autograd.grad(our_loss, (h_RD, weight_VD))
    grads = torch.autograd.grad((a * logp_R + b * entropy_R).sum(), (h_RD, weight_VD))
    torch.testing.assert_close(our_grads, grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, FIVE_ROWS, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_squared_probabilities(chunk_bytes, temperature):
    h_RD, weight_VD, _ = inputs()
    got_R = squared_probabilities(h_RD, weight_VD, temperature=temperature, chunk_bytes=chunk_bytes)
    prob_RV = torch.softmax(h_RD.double() @ weight_VD.double().T / temperature, -1)
    torch.testing.assert_close(got_R, prob_RV.square().sum(-1).float(), rtol=1e-5, atol=1e-6)
    assert not got_R.requires_grad


@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, FIVE_ROWS])
def test_without_entropy(chunk_bytes):
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(
        h_RD,
        weight_VD,
        target_R=target_R,
        temperature=1.0,
        with_entropy=False,
        chunk_bytes=chunk_bytes,
    )
    assert ours.entropy_R is None
    logp_R, _ = plain(h_RD, weight_VD, target_R, 1.0)
    our_grads = torch.autograd.grad((weights()[0] * ours.logp_R).sum(), (h_RD, weight_VD))
    grads = torch.autograd.grad((weights()[0] * logp_R).sum(), (h_RD, weight_VD))
    torch.testing.assert_close(ours.logp_R, logp_R, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_grads, grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_bytes", [ONE_CHUNK, FIVE_ROWS])
def test_gradcheck_in_double(chunk_bytes):
    h_RD, weight_VD, target_R = inputs(torch.float64)
    h_RD, target_R = h_RD[:NUM_CHECKED].detach().requires_grad_(), target_R[:NUM_CHECKED]

    def function(h_RD, weight_VD):
        result = token_log_probs(
            h_RD,
            weight_VD,
            target_R=target_R,
            temperature=0.7,
            with_entropy=True,
            chunk_bytes=chunk_bytes,
        )
        return result.logp_R, result.entropy_R

    assert torch.autograd.gradcheck(function, (h_RD, weight_VD))


def test_reductions_are_fp32_for_bfloat16():
    h_RD, weight_VD, target_R = inputs(torch.bfloat16)
    for chunk_bytes in (ONE_CHUNK, FIVE_ROWS):
        ours = token_log_probs(
            h_RD,
            weight_VD,
            target_R=target_R,
            temperature=1.0,
            with_entropy=True,
            chunk_bytes=chunk_bytes,
        )
        logp_R, entropy_R = plain(h_RD, weight_VD, target_R, 1.0)
        assert ours.logp_R.dtype == torch.float32
        torch.testing.assert_close(ours.logp_R, logp_R, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.entropy_R, entropy_R, rtol=1e-6, atol=1e-6)
        grads = torch.autograd.grad(ours.logp_R.sum(), (h_RD, weight_VD))
        expected = torch.autograd.grad(logp_R.sum(), (h_RD, weight_VD))
        assert [x.dtype for x in grads] == [torch.bfloat16] * 2
        torch.testing.assert_close(grads, expected, rtol=2e-2, atol=5e-2)


def test_backward_twice_gives_the_same():
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(h_RD, weight_VD, target_R=target_R, temperature=1.0, with_entropy=True)
    loss = (ours.logp_R + ours.entropy_R).sum()
    first = torch.autograd.grad(loss, h_RD, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, h_RD)[0])


def test_a_frozen_head_gets_no_gradient():
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(
        h_RD, weight_VD.detach(), target_R=target_R, temperature=1.0, with_entropy=False
    )
    ours.logp_R.sum().backward()
    assert h_RD.grad is not None
    assert weight_VD.grad is None


def test_temperature_zero_is_bounded():
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(h_RD, weight_VD, target_R=target_R, temperature=0.0, with_entropy=True)
    best_R = (h_RD @ weight_VD.T).argmax(-1)
    assert torch.equal(ours.logp_R == 0, best_R == target_R)
    assert ours.entropy_R.abs().max() == 0


def test_no_rows():
    h_RD, weight_VD, target_R = inputs()
    ours = token_log_probs(
        h_RD[:0], weight_VD, target_R=target_R[:0], temperature=1.0, with_entropy=True
    )
    ours.logp_R.sum().backward()
    assert ours.logp_R.shape == ours.entropy_R.shape == (0,)
