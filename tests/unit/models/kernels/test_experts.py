# SPDX-License-Identifier: Apache-2.0
"""The kernels of experts against a loop in fp64, and against torch's operators."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tandem.models import expert_products
from tandem.models.operators import TORCH, Operators

# The experts of each token, hidden, expert width: experts without tokens, fewer rows than a block,
# more than one block, sizes that no block divides.
SIZES = [(1, 1, 1, 8, 16), (3, 4, 2, 16, 8), (21, 5, 3, 40, 24), (70, 3, 2, 72, 40)]
"""Tokens, experts, chosen, hidden, expert width."""
# Sums in fp32 of at most 72 products of numbers of about 1, and roundings of three results.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}


def make(size: tuple[int, ...], *, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the arguments of ``Operators.experts``. An expert that can be left out is."""
    tokens, experts, chosen, hidden, inner = size
    generator = torch.Generator().manual_seed(tokens)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device, dtype)

    usable = max(chosen, experts - 1)
    expert_TK = torch.rand(tokens, usable, generator=generator).topk(chosen)[1]
    return {
        "h_TD": random(tokens, hidden),
        "expert_TK": expert_TK.to(device),
        "weight_TK": torch.rand(tokens, chosen, generator=generator).to(device),
        "gate_up_E2FD": random(experts, 2 * inner, hidden) / hidden**0.5,
        "down_EDF": random(experts, hidden, inner) / inner**0.5,
    }


def expected(inputs: dict[str, Tensor]) -> Tensor:
    """Return the outputs in fp64, token by token."""
    y_TD = torch.zeros_like(inputs["h_TD"], dtype=torch.float64)
    gate_up, down = inputs["gate_up_E2FD"].double(), inputs["down_EDF"].double()
    for token, experts in enumerate(inputs["expert_TK"].tolist()):
        h_D = inputs["h_TD"][token].double()
        for choice, expert in enumerate(experts):
            gated_F = TORCH.gate((gate_up[expert] @ h_D)[None])[0]
            y_TD[token] += inputs["weight_TK"][token, choice].double() * (down[expert] @ gated_F)
    return y_TD


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("size", SIZES)
def test_equals_the_experts_of_each_token(size, dtype, fused, device):
    if dtype == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies matrices of bf16 as integers")
    inputs = make(size, device=device, dtype=dtype)
    with torch.inference_mode():
        y_TD = fused.experts(**inputs)
    assert y_TD.dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(y_TD.double(), expected(inputs), rtol=bound, atol=bound)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("size", [*SIZES[1:], (300, 2, 2, 16, 16)])
def test_parts_of_the_experts_add_up(size, is_fused, fused, device):
    """Each part has the number of its own experts for those of the others, which add nothing. In
    the last case, torch's operator multiplies 16-bit numbers."""
    dtype = torch.float16 if size[0] == 300 else torch.float32
    inputs = make(size, device=device, dtype=dtype)
    num_experts, run = size[1], (fused if is_fused else TORCH).experts
    total_TD = torch.zeros_like(inputs["h_TD"], dtype=torch.float64)
    for first, last in ((0, num_experts // 2), (num_experts // 2, num_experts)):
        own = inputs["expert_TK"] - first
        part = inputs | {
            "expert_TK": own.masked_fill((own < 0) | (own >= last - first), last - first),
            "gate_up_E2FD": inputs["gate_up_E2FD"][first:last],
            "down_EDF": inputs["down_EDF"][first:last],
        }
        with torch.inference_mode():
            y_TD = run(**part, is_part=True)
        assert y_TD.dtype == dtype and y_TD.isfinite().all()
        total_TD += y_TD.double()
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(total_TD, expected(inputs), rtol=bound, atol=bound)


@pytest.mark.parametrize(("num_rows", "num_experts"), [(1, 1), (7, 3), (1024, 5), (2500, 16)])
def test_the_order_is_torchs(num_rows, num_experts, fused, device):
    from tandem.models.kernels.experts import order_by_expert

    generator = torch.Generator().manual_seed(num_rows)
    expert_N = torch.randint(num_experts, (num_rows,), generator=generator).to(device)
    ours = order_by_expert(expert_N, num_experts)
    theirs = expert_products.order_by_expert(expert_N, num_experts)
    for name in ("source_N", "place_N", "stop_E"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_token_has_the_same_output_in_another_batch(fused, device):
    """The order of a sum must not depend on the other tokens."""
    inputs = make((21, 5, 3, 40, 24), device=device, dtype=torch.float32)
    with torch.inference_mode():
        all_TD = fused.experts(**inputs)
        of_token = {n: inputs[n][10:11] for n in ("h_TD", "expert_TK", "weight_TK")}
        alone_TD = fused.experts(**(inputs | of_token))
    if device.type == "cpu":  # interpreted: the order of sums is that of the host's library
        torch.testing.assert_close(all_TD[10:11], alone_TD, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(all_TD[10:11], alone_TD)


def test_many_rows_are_left_to_torch(fused, device):
    """Few experts have many rows each. On a CPU, torch multiplies bf16."""
    inputs = make((600, 2, 1, 16, 8), device=device, dtype=torch.bfloat16)
    inputs["expert_TK"][::2] = 1
    with torch.inference_mode():
        y_TD = fused.experts(**inputs)
    torch.testing.assert_close(y_TD.double(), expected(inputs), rtol=2.0**-5, atol=2.0**-5)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-5)])
def test_gradients_are_those_of_each_token(is_fused, dtype, bound, fused, device):
    """One expert has no token: its gradient is 0. Bounds are relative to the largest gradient. In
    bf16, gate and up, the activation, its product with the weight and the result are rounded.
    """
    inputs = make((24, 4, 2, 64, 32), device=device, dtype=dtype)
    assert 3 not in inputs["expert_TK"]
    names = [name for name in inputs if name != "expert_TK"]
    ours = {name: inputs[name].clone().requires_grad_() for name in names}
    exact = {name: inputs[name].double().requires_grad_() for name in names}
    operators = fused if is_fused else TORCH
    y_TD = operators.experts(**inputs | ours)
    weight_TD = torch.linspace(-1, 1, y_TD.numel(), device=device).view_as(y_TD)
    (y_TD * weight_TD).sum().backward()
    (expected(inputs | exact) * weight_TD).sum().backward()
    for name in names:
        wanted, found = exact[name].grad, ours[name].grad
        assert found.dtype == ours[name].dtype
        assert (found.double() - wanted).abs().max() <= bound * wanted.abs().max(), name
    assert not ours["gate_up_E2FD"].grad[3].any() and not ours["down_EDF"].grad[3].any()


def travel(
    inputs: dict[str, Tensor], *, operators: Operators, kept: list[Tensor] | None = None
) -> Tensor:
    """Return the outputs as divided experts compute them, whose rows come in another order.

    Args:
        kept: gets what is kept for the backward pass.
    """
    expert_TK, weight_TK = inputs["expert_TK"], inputs["weight_TK"]
    num_experts, parts = len(inputs["down_EDF"]), operators.expert_parts
    order = expert_products.order_by_expert(expert_TK.flatten(), num_experts)
    generator = torch.Generator().manual_seed(1)
    mixed_N = torch.randperm(expert_TK.numel(), generator=generator).to(expert_TK.device)
    back_N = mixed_N.argsort()

    def keep(tensor: Tensor) -> Tensor:
        if kept is not None:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        x_ND = expert_products.spread(
            inputs["h_TD"], order, num_chosen=expert_TK.shape[1], parts=parts
        )
        weight_N1 = expert_products.gather_weights(weight_TK, order)
        z_ND = expert_products.train_part(
            x_ND[mixed_N],
            expert_products.order_by_expert(
                expert_TK.flatten()[order.source_N][mixed_N], num_experts
            ),
            weight_M1=weight_N1[mixed_N],
            matrices=expert_products.Matrices(inputs["gate_up_E2FD"], inputs["down_EDF"]),
            parts=parts,
        )
        return expert_products.combine_rows(z_ND[back_N], order, weight_TK=weight_TK, parts=parts)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("size", SIZES[1:])
def test_rows_that_travel_have_the_gradients_of_rows_that_stay(
    size: tuple[int, ...], is_fused: bool, fused: Operators, device: torch.device
) -> None:
    operators, results = fused if is_fused else TORCH, []
    for run in (partial(travel, operators=operators), lambda inputs: operators.experts(**inputs)):
        inputs = make(size, device=device, dtype=torch.float32)
        trained = [inputs[n].requires_grad_() for n in inputs if n != "expert_TK"]
        y_TD = run(inputs)
        y_TD.square().sum().backward()
        results.append([y_TD.detach(), *(tensor.grad for tensor in trained)])
    for ours, theirs in zip(*results, strict=True):
        bound = 1e-5 * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def test_the_rows_that_come_back_are_not_kept(device: torch.device) -> None:
    """Of the rows with D numbers, only those that the experts read are kept."""
    inputs = make((21, 5, 3, 40, 24), device=device, dtype=torch.float32)
    for name, tensor in inputs.items():
        if name != "expert_TK":
            tensor.requires_grad_()
    kept: list[Tensor] = []
    travel(inputs, operators=TORCH, kept=kept)
    rows = {one.data_ptr() for one in kept if one.shape == (21 * 3, 40)}
    assert len(rows) == 1


def test_with_gradients_they_are_torchs(fused, device):
    grads = []
    for operators in (fused, TORCH):
        inputs = make((9, 4, 2, 16, 32), device=device, dtype=torch.float32)
        trained = [inputs[n].requires_grad_() for n in inputs if n != "expert_TK"]
        operators.experts(**inputs).square().sum().backward()
        grads.append([tensor.grad for tensor in trained])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
