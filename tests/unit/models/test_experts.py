# SPDX-License-Identifier: Apache-2.0
"""Models with experts equal transformers' (MO1, MO2), in the extremes of a router too (MO5).

The bounds of MO2 are meant for any processor. Each entry of a product of n terms was computed in
fp64 and changed by a normal deviate of sqrt(n) u times the root of the sum of the squared terms,
u = 2**-24, and every other result by one of u times itself. That is some three times what this test
finds on a processor with AVX2. Of six pairs of such computations by each of six families, log-probs
differ by at most 6.1e-7 for weights with transformers' usual deviation of 0.02, and by 2.7e-5 for
those of 0.2: their logits are ten times as large, and a log-prob is up to -10 in place of -5.
Log-probs are normalized in fp64, as one of -4.6 in fp32 is alone off by 2.4e-7.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tandem.config.derived.experts import ExpertConfig
from tandem.config.derived.sizes import ModelSizes
from tandem.models.experts import Experts
from tandem.models.file_tensors import file_tensors
from tandem.models.operators import TORCH
from tandem.models.router import route
from tests.unit.models.tiny_models import (
    EXPERTS,
    hf_logits,
    open_fp32,
    pack_separate,
    pack_shared,
    sample_sequences,
    write_hf,
    write_xdg,
)

CASES = (*EXPERTS, "XdgMoE")


def write(case, folder, std=0.2):
    if case == "XdgMoE":
        return write_xdg(folder, std=std)
    return write_hf(EXPERTS[case](), folder, std=std)


def logits_of(model, packed):
    return model.hidden(packed) @ model.lm_head_weight.T


def weighted_sum(x):
    """Return a scalar in which every number has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    return (x * torch.randn(x.shape, generator=generator)).sum()


def log_probs_of(logits_TV):
    return logits_TV.double().log_softmax(-1)


@pytest.mark.parametrize(("std", "tolerance"), [(0.02, 2e-6), (0.2, 3e-5)])
@pytest.mark.parametrize("case", CASES)
def test_mo2_log_probs_and_gradients_equal_transformers(case, std, tolerance, tmp_path):
    theirs, ours = write(case, tmp_path, std), open_fp32(tmp_path)
    assert ours.decoder is not None
    sequences = sample_sequences()
    packed = pack_shared(*sequences)
    wanted_TV = log_probs_of(hf_logits(theirs, packed))
    found_TV = log_probs_of(logits_of(ours, packed))
    assert (found_TV - wanted_TV).abs().max() < tolerance
    apart = pack_separate(*sequences)
    with torch.no_grad():
        alone = log_probs_of(hf_logits(theirs, apart))
        assert (log_probs_of(logits_of(ours, apart)) - alone).abs().max() < tolerance
        routes_TLK = torch.arange(ours.decoder.config.experts.num_chosen, dtype=torch.uint8)
        forced = replace(packed, routes_TLK=routes_TLK.expand(len(wanted_TV), 2, -1))
        other_TV = log_probs_of(logits_of(ours, forced))
    assert (other_TV - wanted_TV).abs().max() > 100 * tolerance, "experts do not matter"
    weighted_sum(wanted_TV).backward()
    weighted_sum(found_TV).backward()
    gradients = {name: x.grad for name, x in ours.module.named_parameters()}
    expected = {name: x.grad for name, x in theirs.named_parameters()}
    compared = 0
    # transformers holds all experts of a layer in two tensors, with the names of a fused file.
    for piece in file_tensors(ours.decoder.config, are_fused=True):
        name = piece.name
        if case == "XdgMoE" and "self_attn" in name:
            name = name.replace("layernorm", "norm")
        if gradients[piece.parameter] is None:
            assert piece.parameter.endswith(".correction")
            continue
        scale = expected[name].abs().max()
        found = piece.of(gradients[piece.parameter])
        torch.testing.assert_close(found, expected[name], rtol=0, atol=1e-5 * scale)
        compared += 1
    assert compared == len(expected)


def layer_gradients(theirs):
    """Return the gradients of transformers' layer by our names."""
    named = {
        "router": theirs.gate.weight.grad,
        "routed.gate_up": theirs.experts.gate_up_proj.grad,
        "routed.down": theirs.experts.down_proj.grad,
    }
    shared = getattr(theirs, "shared_expert", None) or getattr(theirs, "shared_experts", None)
    if shared is not None:
        halves = (shared.gate_proj.weight.grad, shared.up_proj.weight.grad)
        named |= {"shared_gate_up": torch.cat(halves), "shared_down": shared.down_proj.weight.grad}
    if hasattr(theirs, "shared_expert_gate"):
        named["shared_gate"] = theirs.shared_expert_gate.weight.grad
    return named


def in_precision(theirs, dtype):
    """Round a layer of transformers to a precision, but let its router multiply in fp32, as ours
    does. The correction stays in fp32 in ours, and in files on the hub.
    """
    for name, x in (*theirs.named_parameters(), *theirs.named_buffers()):
        if "correction" not in name:
            x.data = x.data.to(dtype)
    theirs.gate.weight.data = theirs.gate.weight.data.float()
    theirs.gate.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("case", CASES)
def test_mo1_one_layer_equals_transformers(case, dtype, tolerance, tmp_path):
    """Compare results and all gradients, relative to the largest entry of each."""
    index = 0 if "dense" in case else -1
    theirs = write(case, tmp_path).model.layers[index].mlp
    ours = open_fp32(tmp_path).in_dtype(dtype).decoder.layers[index].experts
    in_precision(theirs, dtype)
    h_TD = torch.randn(50, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    inputs = [h_TD.clone().requires_grad_() for _ in range(2)]
    wanted, found = theirs(inputs[0][None])[0], ours(inputs[1], TORCH)
    assert found.dtype == dtype
    weighted_sum(wanted.float()).backward()
    weighted_sum(found.float()).backward()
    expected = {"result": wanted, "input": inputs[0].grad, **layer_gradients(theirs)}
    gradients = {name: x.grad for name, x in ours.named_parameters() if x.grad is not None}
    actual = {"result": found, "input": inputs[1].grad, **gradients}
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert (actual[name] - x).abs().max() <= tolerance * x.abs().max(), name


def layer(**settings) -> Experts:
    """Return a layer of four experts, of which each token chooses two."""
    module = Experts(ExpertConfig(4, 2, inner=8, **settings), 12)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return module


def one_by_one(module: Experts, h_TD):
    """Compute each token by each of its experts, which is the definition."""
    rows = []
    expert_TK, weight_TK = route(
        h_TD, module.router, config=module.config, correction_E=module.correction
    )
    for h_D, experts, weights in zip(h_TD, expert_TK.tolist(), weight_TK, strict=True):
        parts = [
            weight
            * (module.routed.down[e] @ TORCH.gate(F.linear(h_D[None], module.routed.gate_up[e]))[0])
            for e, weight in zip(experts, weights, strict=True)
        ]
        rows.append(sum(parts))
    return torch.stack(rows)


def inputs(num_tokens: int):
    generator = torch.Generator().manual_seed(4)
    return torch.randn(num_tokens, 12, generator=generator).requires_grad_()


def all_to_two(module):
    """Give experts 1 and 3 all tokens."""
    module.correction.data = torch.tensor([0.0, 9.0, 0.0, 8.0])


def equal_logits(module):
    """Let all logits be equal."""
    module.router.data.zero_()


@pytest.mark.parametrize("change", [None, all_to_two, equal_logits])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_mo5_extremes_of_the_router(change, num_tokens):
    module, h_TD = layer(scoring="sigmoid", has_correction=True, is_renormalized=True), None
    if change is not None:
        change(module)
    h_TD = inputs(num_tokens)
    found, wanted = module(h_TD, TORCH), one_by_one(module, h_TD)
    torch.testing.assert_close(found, wanted)
    with torch.no_grad():  # the operators of a rollout
        assert torch.equal(module(h_TD, TORCH), module(h_TD, TORCH))
    trained = [h_TD, module.router, module.routed.gate_up, module.routed.down]
    ours = torch.autograd.grad(weighted_sum(found), trained, retain_graph=True)
    theirs = torch.autograd.grad(weighted_sum(wanted), trained)
    for own, other in zip(ours, theirs, strict=True):
        assert own.isfinite().all()
        torch.testing.assert_close(own, other)
    if change is all_to_two:
        assert not ours[2][0].any() and not ours[2][2].any() and ours[2][1].any()


def test_mo5_ties_are_broken_alike_with_and_without_gradients():
    module, h_TD = layer(), inputs(9)
    equal_logits(module)
    chosen, _ = route(h_TD, module.router, config=module.config, correction_E=None)
    with torch.inference_mode():
        again, _ = route(h_TD, module.router, config=module.config, correction_E=None)
    assert torch.equal(chosen, again)


def test_mo1_softmax_of_chosen_logits():
    """Compute red-moe's third router; no family of transformers has it without biases."""
    module, h_TD = layer(scoring="softmax_of_chosen", scale=1.5), inputs(6)
    expert_TK, weight_TK = route(h_TD, module.router, config=module.config, correction_E=None)
    logits_TE = h_TD @ module.router.T
    top = logits_TE.topk(2, -1)
    assert torch.equal(expert_TK, top.indices)
    torch.testing.assert_close(weight_TK, top.values.softmax(-1) * 1.5)


def test_mo1_the_router_multiplies_in_fp32_and_has_a_gradient():
    module = layer().to(torch.bfloat16)
    h_TD = inputs(5).detach().to(torch.bfloat16)
    expert_TK, weight_TK = route(h_TD, module.router, config=module.config, correction_E=None)
    scores = (h_TD.float() @ module.router.float().T).softmax(-1)
    assert torch.equal(weight_TK, scores.gather(1, expert_TK))
    weight_TK[:, 0].sum().backward()
    assert module.router.grad.any()


class Products(TorchDispatchMode):
    """Counts products with the matrices of experts."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func == torch.ops.aten._grouped_mm.default
        return func(*args, **(kwargs or {}))


def test_recomputation_repeats_no_product_of_experts_that_it_does_not_name(tmp_path):
    """Two products a layer in the forward pass, and four in the backward pass."""
    write("qwen3_moe", tmp_path)
    model = open_fp32(tmp_path).in_dtype(torch.bfloat16)
    packed = pack_shared(*sample_sequences())
    found = {}
    for granularity in ("nothing", "pointwise", "feed_forward", "full"):
        if granularity != "nothing":
            model.set_gradient_checkpointing(True, granularity)
        model.module.zero_grad()
        with Products() as products:
            weighted_sum(logits_of(model, packed).float()).backward()
        gradients = [x.grad.clone() for x in model.module.parameters() if x.grad is not None]
        found[granularity] = (products.count / len(model.decoder.layers), gradients)
    assert [count for count, _ in found.values()] == [6, 6, 8, 8]
    for _, gradients in found.values():
        assert all(map(torch.equal, gradients, found["nothing"][1]))


def test_experts_that_are_frozen_cost_no_gradient(tmp_path):
    """Adapters of attention freeze them: two products a layer in the backward pass, of tokens."""
    write("qwen3_moe", tmp_path)
    model = open_fp32(tmp_path).in_dtype(torch.bfloat16)
    for name, parameter in model.module.named_parameters():
        parameter.requires_grad_("qkv" in name)
    with Products() as products:
        weighted_sum(logits_of(model, pack_shared(*sample_sequences())).float()).backward()
    # The experts of the first layer, too: its attention is trained.
    assert products.count / len(model.decoder.layers) == 4
    assert all((x.grad is None) == ("qkv" not in n) for n, x in model.module.named_parameters())


def test_a_layer_that_is_recomputed_uses_the_order_of_its_recomputation():
    """Its router may choose other experts, if rounding is not the same."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((6, 8), (4, 16, 8), (4, 8, 8))
    h_TD, gate_up_E2FD, down_EDF = (torch.randn(size, generator=generator) for size in sizes)
    weight_TK = torch.rand((6, 2), generator=generator).requires_grad_()
    first = torch.tensor([[0, 1], [2, 3], [1, 2], [0, 3], [1, 0], [3, 2]])
    second = first.flip(0)
    inputs = [h_TD.requires_grad_(), gate_up_E2FD.requires_grad_(), down_EDF.requires_grad_()]

    def run(choices):
        return TORCH.experts(
            h_TD,
            next(choices),
            weight_TK=weight_TK,
            gate_up_E2FD=gate_up_E2FD,
            down_EDF=down_EDF,
        )

    y_TD = checkpoint(run, iter((first, second)), use_reentrant=False)
    found = torch.autograd.grad(weighted_sum(y_TD), [*inputs, weight_TK])
    expected = torch.autograd.grad(weighted_sum(run(iter((second,)))), [*inputs, weight_TK])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_tokens_and_what_experts_make_of_them_before_the_activation(dtype):
    """And not the rows that experts read, nor their outputs: T K D numbers each."""
    num_tokens, hidden, inner, chosen = 300, 64, 16, 4
    config = ExpertConfig(num_experts=8, num_chosen=chosen, inner=inner)
    layer = Experts(config, hidden).to(dtype)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.1)
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    kept: dict[int, int] = {}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    h_TD = torch.randn(num_tokens, hidden, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y_TD = layer(h_TD, TORCH)
    sizes = ModelSizes(1, hidden, 0, 0, 0, 0, 0, tied=True, experts=config)
    numbers = sum(kept.values()) / num_tokens / 2
    # The plan counts in half precision; the norm is outside.
    planned = hidden + sizes._kept_by_experts(1)
    assert numbers < (1 if dtype == torch.bfloat16 else 2) * 1.1 * planned
    assert y_TD.requires_grad


def test_a_weight_of_zero_has_a_gradient():
    """It is that of the experts' outputs, though these are not kept."""
    generator = torch.Generator().manual_seed(0)
    h_TD, gate_up_E2FD, down_EDF = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((5, 8), (3, 12, 8), (3, 8, 6))
    )
    expert_TK = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    weight_TK = torch.rand((5, 2), generator=generator, dtype=torch.float64)
    weight_TK[1, 0] = 0.0
    inputs = [x.requires_grad_() for x in (h_TD, weight_TK, gate_up_E2FD, down_EDF)]

    def run(h_TD, weight_TK, gate_up_E2FD, down_EDF):
        return TORCH.experts(
            h_TD, expert_TK, weight_TK=weight_TK, gate_up_E2FD=gate_up_E2FD, down_EDF=down_EDF
        )

    assert torch.autograd.gradcheck(run, inputs)
