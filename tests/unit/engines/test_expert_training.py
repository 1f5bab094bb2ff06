# SPDX-License-Identifier: Apache-2.0
"""The correction of a router is never trained (MO4), and recomputation changes no gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.config.schema.optim import OptimConfig
from tandem.engines.muon import orthogonalise
from tandem.engines.single import SingleDeviceEngine
from tandem.models.folder import check_folder, freeze_router, open_model, open_part
from tandem.models.parallel import WHOLE
from tests.unit.engines.minibatch import LOSS, SCALE, cut_batches
from tests.unit.models.tiny_models import EXPERTS, write_hf

NAME = "layers.1.experts.correction"


@pytest.mark.parametrize("offloads", [False, True])
def test_mo4_three_steps_leave_the_correction_as_it_was(offloads, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    write_hf(EXPERTS["dots1"](), source)
    saved.mkdir()

    def engine_of(folder):
        model = open_model(str(folder), dtype=torch.float32, device="cpu")
        engine = SingleDeviceEngine(
            model,
            OptimConfig(lr=1e-2, weight_decay=0.5),
            total_training_steps=3,
            compute=model.in_dtype(torch.bfloat16) if offloads else None,
            offload_optimizer=offloads,
            offload_weights=offloads,
        )
        return engine, dict(model.decoder.named_parameters())

    engine, weights = engine_of(source)
    before = {name: x.detach().clone() for name, x in weights.items()}
    for _ in range(3):
        engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
    assert torch.equal(weights[NAME], before[NAME]) and before[NAME].any()
    assert not torch.equal(weights["layers.1.experts.router"], before["layers.1.experts.router"])
    engine.save(saved)
    moments = torch.load(saved / "optimizer.pt")["optimizer"]["AdamW"]["exp_avg"]
    assert len(moments) == len(weights) - 1  # the second layer alone has experts
    restored, again = engine_of(source)
    restored.load(saved)
    assert all(torch.equal(again[name], x) for name, x in weights.items())


@pytest.mark.parametrize(
    ("optimizer", "streams", "offloads"),
    [("AdamW", False, False), ("AdamW", True, True), ("Muon", False, False)],
)
def test_frozen_routers_have_no_gradient_and_stay_as_they_were(
    optimizer, streams, offloads, tmp_path
):
    """With weight decay, and with a gate of the shared expert, which is frozen, too."""
    write_hf(EXPERTS["qwen2_moe"](), tmp_path)
    frozen = freeze_router(check_folder(str(tmp_path)))
    model = open_part(frozen, WHOLE, dtype=torch.float32, device="cpu")
    weights = dict(model.decoder.named_parameters())
    before = {name: x.detach().clone() for name, x in weights.items()}
    engine = SingleDeviceEngine(
        model,
        OptimConfig(optimizer=optimizer, lr=1e-2, muon_lr=1e-2, weight_decay=0.5),
        total_training_steps=3,
        compute=model.in_dtype(torch.bfloat16) if offloads else None,
        offload_optimizer=streams,
        offload_weights=offloads,
    )
    for _ in range(2):
        engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
    same = {name for name, x in weights.items() if torch.equal(x, before[name])}
    layers = (f"layers.{layer}.experts" for layer in range(len(model.decoder.layers)))
    assert same == {f"{layer}.{part}" for layer in layers for part in ("router", "shared_gate")}
    model.module.zero_grad()
    model.hidden(cut_batches()[0]).square().sum().backward()
    assert not any(weights[name].grad.any() for name in same)


@pytest.mark.parametrize("case", ["qwen3_moe_dense_layer", "dots1", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_gradients_are_the_same_bit_for_bit(case, dtype, tmp_path):
    write_hf(EXPERTS[case](), tmp_path)
    model = open_model(str(tmp_path), dtype=dtype, device="cpu")
    (batch,) = cut_batches(max_sequences=64)

    def gradients():
        model.module.zero_grad()
        model.hidden(batch).square().sum().backward()
        return {name: x.grad for name, x in model.module.named_parameters() if x.grad is not None}

    kept = gradients()
    for granularity in ("pointwise", "feed_forward", "full"):
        model.set_gradient_checkpointing(True, granularity)
        again = gradients()
        assert all(torch.equal(again[name], x) for name, x in kept.items())


def test_muon_treats_each_matrix_of_each_expert_alone(tmp_path):
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    model = open_model(str(tmp_path), dtype=torch.float32, device="cpu")
    optim = OptimConfig(optimizer="Muon", muon_lr=1e-2, weight_decay=0.0)
    engine = SingleDeviceEngine(model, optim, total_training_steps=3)
    weights = dict(model.decoder.named_parameters())
    names = (
        "layers.0.experts.routed.gate_up",
        "layers.0.experts.routed.down",
        "layers.0.experts.router",
    )
    before = {name: weights[name].detach().clone() for name in names}
    engine.update(cut_batches(), LOSS, scale=SCALE, temperature=1.0)
    momentum = engine._optimizer.state_dict()["Muon"]["momentum"]
    momenta = dict(zip(engine._optimizer.members["Muon"], momentum, strict=True))
    for name in names:
        whole = momenta[name] if "router" not in name else momenta[name][None]
        step = before[name] - weights[name].detach()
        step = step if "router" not in name else step[None]
        halves = 2 if "gate_up" in name else 1
        for own, moved in zip(whole, step, strict=True):
            for part, change in zip(own.chunk(halves), moved.chunk(halves), strict=True):
                # The first momentum is parallel to the gradient; both sides round to bf16.
                wanted = orthogonalise(part[None])[0].float()
                assert F.cosine_similarity(change.flatten(), wanted.flatten(), dim=0) > 0.9
                # Matrices that were stacked would share one norm and move less.
                rate = 1e-2 * max(1.0, part.shape[0] / part.shape[1]) ** 0.5
                assert 0.7 < torch.linalg.matrix_norm(change, 2) / rate < 1.3
