# SPDX-License-Identifier: Apache-2.0
"""The kernel of the router against torch's operators in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.config.derived.experts import ExpertConfig
from tandem.models.operators import TORCH

PLAIN = ExpertConfig(num_experts=5, num_chosen=2, inner=8)
CONFIGS = {
    "softmax": PLAIN,
    "softmax, one of a power of two": replace(PLAIN, num_experts=16, num_chosen=1),
    "softmax of Qwen3": replace(PLAIN, num_experts=60, num_chosen=8, is_renormalized=True),
    "sigmoid": replace(PLAIN, num_experts=24, num_chosen=3, scoring="sigmoid", scale=2.5),
    "sigmoid with a correction": replace(
        PLAIN, num_experts=24, scoring="sigmoid", has_correction=True, is_renormalized=True
    ),
    "softmax of the chosen": replace(PLAIN, num_chosen=3, scoring="softmax_of_chosen"),
    "all experts": replace(PLAIN, num_chosen=5, is_renormalized=True),
}
# Sums of at most 72 products of numbers of about 1 in fp32, and two exponentials.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 21])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_equals_torchs_router(name, tokens, dtype, fused, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bf16 as integers")
    config, generator = CONFIGS[name], torch.Generator().manual_seed(tokens)
    h_TD = torch.randn(tokens, 72, generator=generator).to(device, dtype)
    router_ED = torch.randn(config.num_experts, 72, generator=generator).to(device, dtype)
    correction = torch.randn(config.num_experts, generator=generator).to(device)
    given = {"config": config, "correction_E": correction if config.has_correction else None}
    with torch.inference_mode():
        expert_TK, weight_TK = fused.route(h_TD, router_ED, **given)
    assert expert_TK.dtype == torch.int64 and weight_TK.dtype == torch.float32
    assert all(len(set(row)) == config.num_chosen for row in expert_TK.tolist())
    _, best_TK = TORCH.route(h_TD.double(), router_ED.double(), **given)
    # Where two scores are closer than the error, either expert may be chosen.
    _, same_TK = TORCH.route(h_TD.double(), router_ED.double(), **given, choose=lambda _: expert_TK)
    torch.testing.assert_close(weight_TK.double(), same_TK, **CLOSE)
    if not config.has_correction:
        torch.testing.assert_close(same_TK, best_TK, **CLOSE)


def test_of_equal_experts_the_first_are_chosen(fused, device):
    h_TD = torch.ones(3, 16, device=device)
    router_ED = torch.ones(5, 16, device=device)
    router_ED[4] = 2
    with torch.inference_mode():
        expert_TK, weight_TK = fused.route(h_TD, router_ED, config=PLAIN, correction_E=None)
    assert expert_TK.tolist() == [[4, 0]] * 3
    assert bool((weight_TK[:, 0] > weight_TK[:, 1]).all())


def test_states_that_are_no_numbers_choose_experts_that_exist(fused, device):
    h_TD = torch.full((2, 16), float("nan"), device=device)
    router_ED = torch.ones(5, 16, device=device)
    with torch.inference_mode():
        expert_TK, weight_TK = fused.route(h_TD, router_ED, config=PLAIN, correction_E=None)
    assert bool(((expert_TK >= 0) & (expert_TK < 5)).all())
    assert bool(weight_TK.isnan().any())


def test_choices_that_are_replaced_are_torchs(fused, device):
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(4, 16, generator=generator).to(device)
    router_ED = torch.randn(5, 16, generator=generator).to(device)
    forced_TK = torch.tensor([[1, 3]] * 4, device=device)
    with torch.inference_mode():
        for operators in (fused, TORCH):
            expert_TK, _ = operators.route(
                h_TD, router_ED, config=PLAIN, correction_E=None, choose=lambda _: forced_TK
            )
            assert torch.equal(expert_TK, forced_TK)


def test_a_choice_that_is_only_recorded_is_the_kernels(fused, device):
    """Experts and weights are the same bit by bit, and the recorder sees the experts."""
    generator = torch.Generator().manual_seed(0)
    h_TD = torch.randn(4, 16, generator=generator).to(device)
    router_ED = torch.randn(5, 16, generator=generator).to(device)
    given, seen = {"config": PLAIN, "correction_E": None}, []

    def record(expert_TK):
        seen.append(expert_TK)
        return expert_TK

    with torch.inference_mode():
        expert_TK, weight_TK = fused.route(h_TD, router_ED, **given)
        recorded_TK, same_TK = fused.route(h_TD, router_ED, **given, choose=record)
    assert torch.equal(recorded_TK, expert_TK) and torch.equal(same_TK, weight_TK)
    assert seen[0] is recorded_TK


def test_no_tokens_are_routed(fused, device):
    empty_TD = torch.empty(0, 16, device=device)
    with torch.inference_mode():
        expert_TK, weight_TK = fused.route(
            empty_TD, torch.ones(5, 16, device=device), config=PLAIN, correction_E=None
        )
    assert expert_TK.shape == weight_TK.shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_experts", [5, 60])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_gradients_of_training(tokens, num_experts, dtype, fused, device):
    """Against fp64. In bf16, gradients differ by their own rounding and no more."""
    config = replace(PLAIN, num_experts=num_experts, num_chosen=3, is_renormalized=True)
    generator = torch.Generator().manual_seed(tokens)
    h_TD = torch.randn(tokens, 72, generator=generator).to(device, dtype)
    router_ED = 0.1 * torch.randn(num_experts, 72, generator=generator).to(device)
    router_ED = router_ED.to(dtype)
    scale_TK = torch.randn(tokens, 3, generator=generator).to(device)
    results = []
    for route, wide in ((fused.route, dtype), (TORCH.route, torch.float64)):
        leaves = [x.detach().to(wide).requires_grad_() for x in (h_TD, router_ED)]
        expert_TK, weight_TK = route(*leaves, config=config, correction_E=None)
        (weight_TK * scale_TK).sum().backward()
        results.append((expert_TK, weight_TK, *(leaf.grad for leaf in leaves)))
    ours, theirs = results
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1].double(), theirs[1], **CLOSE)
    for our, their in zip(ours[2:], theirs[2:], strict=True):
        assert our.dtype == dtype
        largest = their.abs().max().item() if their.numel() else 0.0
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(our.double(), their, rtol=rounding, atol=1e-4 * largest)


def test_a_frozen_router_or_a_frozen_input_has_no_gradient(fused, device):
    for number in (0, 1):
        leaves = [torch.randn(4, 16).to(device, torch.bfloat16) for _ in range(2)]
        leaves[number].requires_grad_()
        _, weight_TK = fused.route(*leaves, config=replace(PLAIN, num_experts=4), correction_E=None)
        weight_TK.sum().backward()
        assert leaves[number].grad is not None and leaves[1 - number].grad is None
