# SPDX-License-Identifier: Apache-2.0
"""The decoder equals transformers: logits and gradients, packed and alone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.engines.gradient_sums import GradientSums
from tandem.models.attention import PackedAttention
from tandem.models.file_tensors import file_tensors
from tandem.models.operators import TORCH
from tandem.types import PackedBatch, Segments
from tests.unit.models.tiny_models import (
    NATIVE,
    VOCAB,
    hf_logits,
    open_fp32,
    pack_separate,
    pack_shared,
    sample_sequences,
    write_hf,
)


def logits_of(model, packed: PackedBatch):
    return model.hidden(packed) @ model.lm_head_weight.T


def weighted_sum(logits_TV):
    """Return a scalar in which every logit has a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    return (logits_TV * torch.randn(logits_TV.shape, generator=generator)).sum()


def gradients(model, packed: PackedBatch) -> dict:
    model.module.zero_grad()
    weighted_sum(logits_of(model, packed)).backward()
    return {name: x.grad.clone() for name, x in model.module.named_parameters()}


@pytest.mark.parametrize("case", NATIVE)
def test_packed_logits_equal_transformers(case, tmp_path):
    theirs = write_hf(NATIVE[case](), tmp_path)
    ours = open_fp32(tmp_path)
    assert ours.decoder is not None
    sequences = sample_sequences()
    with torch.no_grad():
        for packed in (pack_shared(*sequences), pack_separate(*sequences)):
            difference = logits_of(ours, packed) - hf_logits(theirs, packed)
            assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("case", NATIVE)
def test_single_sequence_equals_transformers(case, tmp_path):
    theirs = write_hf(NATIVE[case](), tmp_path)
    decoder = open_fp32(tmp_path).decoder
    ids_T = torch.arange(40) % VOCAB
    zero, length = torch.tensor([0]), torch.tensor([40])
    attention = PackedAttention(Segments(zero, length, zero, zero))
    with torch.no_grad():
        ours_TV = decoder(ids_T, torch.arange(40), attention) @ decoder.lm_head_weight.T
        theirs_TV = theirs(input_ids=ids_T[None]).logits[0]
    assert (ours_TV - theirs_TV).abs().max() < 1e-5


@pytest.mark.parametrize("case", NATIVE)
def test_gradients_equal_transformers(case, tmp_path):
    theirs = write_hf(NATIVE[case](), tmp_path)
    ours = open_fp32(tmp_path)
    packed = pack_shared(*sample_sequences())
    our_grads = gradients(ours, packed)
    weighted_sum(hf_logits(theirs, packed)).backward()
    their_grads = {name: x.grad for name, x in theirs.named_parameters()}
    pieces = list(file_tensors(ours.decoder.config))
    assert {x.name for x in pieces} == set(their_grads)
    for x in pieces:
        ours_part = our_grads[x.parameter][x.start : x.start + x.rows]
        scale = their_grads[x.name].abs().max()
        torch.testing.assert_close(ours_part, their_grads[x.name], rtol=0, atol=1e-5 * scale)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["qwen2_tied", "qwen3_biases"])
def test_gradient_checkpointing_changes_nothing_but_the_work(case, dtype, tmp_path):
    write_hf(NATIVE[case](), tmp_path)
    model = open_fp32(tmp_path).in_dtype(dtype)
    layers = len(model.decoder.layers)
    packed = pack_shared(*sample_sequences())
    with Products() as products:
        kept = gradients(model, packed)
    for granularity, more in (("pointwise", 0), ("feed_forward", 1), ("full", 3)):
        model.set_gradient_checkpointing(True, granularity)
        with Products() as repeated:
            recomputed = gradients(model, packed)
        assert kept.keys() == recomputed.keys()
        assert all(torch.equal(kept[name], recomputed[name]) for name in kept)
        assert repeated.count - products.count == more * layers


def test_products_that_add_to_sums_of_gradients_are_not_repeated_either(tmp_path):
    write_hf(NATIVE["qwen3_biases"](), tmp_path)
    model = open_fp32(tmp_path).in_dtype(torch.bfloat16)
    packed = pack_shared(*sample_sequences())
    weights = dict(model.decoder.named_parameters())
    sums = GradientSums(weights, dict.fromkeys(weights, torch.float32), operators=TORCH)
    counts, totals = [], []
    for granularity in (None, "pointwise", "feed_forward", "full"):
        model.set_gradient_checkpointing(granularity is not None, granularity or "full")
        sums.begin()
        with Products() as products:
            model.hidden(packed).float().square().sum().backward()
        counts.append(products.count)
        totals.append(sums.totals())
    layers = len(model.decoder.layers)
    assert [count - counts[0] for count in counts] == [0, 0, layers, 3 * layers]
    for found in totals[1:]:
        assert all(torch.equal(found[name], total) for name, total in totals[0].items())


def bytes_kept(model, packed: PackedBatch) -> int:
    """Return the bytes of all storages kept for the backward pass, without parameters."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive: no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden(packed)
    for parameter in model.module.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_gradient_checkpointing_keeps_less(tmp_path):
    """Check the bytes that both norms, the second sum, the sigmoid and its product would keep for
    each token in each layer, in exchange for the added tensor; then those of gate and up, too."""
    write_hf(NATIVE["llama"](), tmp_path)
    model = open_fp32(tmp_path)
    packed = pack_shared(*sample_sequences())
    config, num_tokens = model.decoder.config, len(packed.token_ids_T)
    hidden, inner = config.hidden_size, config.intermediate_size
    found = [bytes_kept(model, packed)]
    for granularity in ("pointwise", "feed_forward", "full"):
        model.set_gradient_checkpointing(True, granularity)
        found.append(bytes_kept(model, packed))
    per_token = 4 * config.num_layers * num_tokens
    assert found[0] - found[1] == per_token * (2 + 2 * hidden + 2 * inner)
    assert found[1] - found[2] == per_token * 2 * inner
    assert found[3] < found[2] / 2


def test_gradient_checkpointing_recomputes_layers(tmp_path):
    write_hf(NATIVE["llama"](), tmp_path)
    model = open_fp32(tmp_path)
    calls = []
    model.decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    packed = pack_shared(*sample_sequences())
    gradients(model, packed)
    assert len(calls) == 1
    model.set_gradient_checkpointing(True)
    gradients(model, packed)
    assert len(calls) == 3


def test_tied_head_is_the_embedding(tmp_path):
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "tied")
    write_hf(NATIVE["qwen2_untied"](), tmp_path / "untied")
    tied, untied = open_fp32(tmp_path / "tied"), open_fp32(tmp_path / "untied")
    assert tied.lm_head_weight is tied.decoder.embedding.weight
    counts = [sum(p.numel() for p in model.module.parameters()) for model in (untied, tied)]
    assert counts[0] - counts[1] == untied.lm_head_weight.numel()
