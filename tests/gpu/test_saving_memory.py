# SPDX-License-Identifier: Apache-2.0
"""What saves memory in training: what it frees on a device, and that results stay what they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")
pytest.importorskip("pydantic", reason="the engine's configuration needs pydantic")

from tandem.config.derived.sizes import ModelSizes
from tandem.data.packing import TrainSequence
from tandem.engines import streaming
from tandem.engines.adamw import AdamW, round_stochastically
from tandem.engines.offload import HostMemory, OffloadedParameters, wait_for
from tandem.engines.streaming import StreamedStep
from tandem.models.decoder import Granularity
from tandem.platforms.page_locked import page_locked_zeros
from tandem.types import PackedBatch
from tests.fakes.scoring import score_batch
from tests.gpu.machine import Machine, Shape, make_pair, open_ours
from tests.gpu.test_training import batches_of

SHAPE = Shape("qwen2", 64, 2, 7, vocabulary=3001)
DEEP = replace(SHAPE, layers=16)
GRANULARITIES: tuple[Granularity, ...] = ("pointwise", "feed_forward", "full")
NUM_DRAWS = 4000


def batch_of(machine: Machine) -> PackedBatch:
    """Prompts of 40 tokens, eight responses of 90 each, all in one micro-batch."""
    prompts, response = (2, (5,) * 6) if machine.trial else (12, (5,) * 90)
    sequences = [TrainSequence(i // 8, (7,) * 40, response) for i in range(8 * prompts)]
    (batch,) = batches_of(sequences, None)
    return batch


def dtype_of(machine: Machine) -> torch.dtype:
    """A CPU has no flash attention in bf16."""
    return torch.float32 if machine.trial else torch.bfloat16


def gradients_of(model, batch: PackedBatch) -> dict[str, Tensor]:
    """Of the sum of all log-probs."""
    model.module.zero_grad()
    score_batch(model, batch, temperature=1.0, with_entropy=False).score_R.sum().backward()
    return {name: parameter.grad for name, parameter in model.module.named_parameters()}


def kept_bytes(model, batch: PackedBatch) -> int:
    """On the device between forward and backward pass of the decoder."""
    model.hidden(batch)  # compiles what is to be compiled
    before = torch.accelerator.memory_allocated()
    h_TD = model.hidden(batch)
    kept = torch.accelerator.memory_allocated() - before
    assert h_TD.requires_grad
    return kept


def test_recomputing_keeps_what_the_plan_says(machine: Machine, tmp_path: Path) -> None:
    if machine.trial:
        pytest.skip("it counts the memory of a device")
    make_pair(DEEP, machine, tmp_path)
    model = open_ours(tmp_path, machine, dtype=torch.bfloat16)
    batch = batch_of(machine)
    sizes = ModelSizes.of(DEEP.hf_config().to_dict())
    assert sizes is not None
    whole = sizes.layer_numbers_per_token()
    found = []
    for granularity in (None, *GRANULARITIES):
        model.set_gradient_checkpointing(granularity is not None, granularity or "full")
        numbers = sizes.kept_numbers_per_token(granularity) - (whole if granularity else 0)
        kept = kept_bytes(model, batch)
        found.append(kept)
        expected = 2 * numbers * len(batch.token_ids_T)
        assert kept == pytest.approx(expected, rel=0.2), f"{granularity}: {kept} of {found[0]}"
    assert found == sorted(found, reverse=True)


def test_recomputing_changes_gradients_by_rounding_at_most(
    machine: Machine, tmp_path: Path
) -> None:
    """Flash attention adds its gradients in the order of chance, in any case."""
    make_pair(SHAPE, machine, tmp_path)
    model = open_ours(tmp_path, machine, dtype=dtype_of(machine))
    batch = batch_of(machine)
    expected = gradients_of(model, batch)
    for granularity in GRANULARITIES:
        model.set_gradient_checkpointing(True, granularity)
        for name, gradient in gradients_of(model, batch).items():
            norm = float(expected[name].float().norm())
            difference = float((gradient.float() - expected[name].float()).norm())
            assert difference <= (1e-5 if machine.trial else 0.02) * norm, (granularity, name)


def test_gradients_of_shared_rows_add_up_in_a_fixed_order(machine: Machine, tmp_path: Path) -> None:
    """Eight responses begin at the last token of their prompt."""
    make_pair(SHAPE, machine, tmp_path)
    model = open_ours(tmp_path, machine, dtype=dtype_of(machine))
    batch = batch_of(machine)
    h_TD = model.hidden(batch).detach().requires_grad_()

    class Fixed:
        """The model, after its hidden states."""

        operators, layout, lm_head_weight = model.operators, model.layout, model.lm_head_weight
        value_head = None

        def hidden(self, packed: PackedBatch) -> Tensor:
            return h_TD

    assert len(batch.source_R.unique()) < len(batch.source_R)
    weights_R = torch.randn(len(batch.source_R), generator=torch.Generator().manual_seed(1))
    found = []
    for _ in range(10):
        scores = score_batch(Fixed(), batch, temperature=1.0, with_entropy=False)
        loss = (scores.score_R * weights_R.to(machine.device)).sum()
        found += torch.autograd.grad(loss, h_TD)
    assert bool(found[0].any())
    assert all(torch.equal(gradient, found[0]) for gradient in found)


def test_random_rounding_is_right_in_the_mean(machine: Machine) -> None:
    x_N = torch.randn(500, generator=torch.Generator().manual_seed(1)).to(machine.device)
    generator = torch.Generator(machine.device).manual_seed(2)
    draws = round_stochastically(x_N.repeat(NUM_DRAWS), generator).view(NUM_DRAWS, -1).double()
    spacing_N = 2.0 ** (x_N.double().abs().log2().floor() - 7)
    error_N = (draws.mean(0) - x_N.double()).abs()
    assert bool((error_N <= 4.5 * spacing_N / 2 / NUM_DRAWS**0.5).all())


def steps(machine: Machine) -> Iterator[Tensor]:
    """Gradients."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        yield torch.randn(300, 40, generator=generator).to(machine.device)


def test_half_moments_learn_as_whole_ones_and_twice_the_same(machine: Machine) -> None:
    found = []
    for half in (False, True, True):
        optimizer = AdamW(
            betas=(0.9, 0.999), weight_decay=0.0, stored=torch.float32, half_moments=half
        )
        weights = {"x": torch.zeros(300, 40, device=machine.device)}
        for gradient in steps(machine):
            optimizer.step(weights, {"x": gradient}, rate=1e-3)
        found.append(weights["x"])
    assert torch.equal(found[1], found[2])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=20 * 1e-3 * 0.02)


def test_a_step_by_parts_is_that_of_all_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the next part and of the last one run beside the step of a part."""
    monkeypatch.setattr(streaming, "OPTIMIZER_PART_NUMBERS", 3 << 20)
    num_weights, size = (8, 64) if machine.trial else (40, 1 << 20)
    generator = torch.Generator(machine.device).manual_seed(0)

    def draw() -> list[torch.Tensor]:
        return [
            torch.randn(size, device=machine.device, generator=generator)
            for _ in range(num_weights)
        ]

    start = draw()
    gradients = [{str(i): x for i, x in enumerate(draw())} for _ in range(4)]

    def optimizer() -> AdamW:
        return AdamW(betas=(0.9, 0.99), weight_decay=0.1, stored=torch.float32)

    expected = {str(i): x.clone() for i, x in enumerate(start)}
    at_once = optimizer()
    for gradient in gradients:
        at_once.step(expected, gradient, rate=1e-2)
    weights = {str(i): torch.nn.Parameter(x.clone()) for i, x in enumerate(start)}
    by_parts = StreamedStep(
        optimizer(),
        device=machine.device,
        offloaded=OffloadedParameters(weights.values()),
        hosts_moments=True,
    )
    copies = {name: torch.empty_like(x) for name, x in expected.items()}
    for gradient in gradients:
        for part in by_parts.parts(weights, gradient, rate=1e-2):
            for name, weight in part.items():
                copies[name].copy_(weight.detach())
    for name, weight in weights.items():
        assert weight.device.type == "cpu"
        assert torch.equal(weight.detach().to(machine.device), expected[name])
        assert torch.equal(copies[name], expected[name])


def test_offloaded_weights_leave_the_device(machine: Machine, tmp_path: Path) -> None:
    if machine.trial:
        pytest.skip("it counts the memory of a device")
    make_pair(SHAPE, machine, tmp_path)
    model = open_ours(tmp_path, machine, dtype=torch.float32)
    values = [parameter.detach().cpu() for parameter in model.module.parameters()]
    before = torch.accelerator.memory_allocated()
    offloaded = OffloadedParameters(model.module.parameters())
    freed = before - torch.accelerator.memory_allocated()
    assert freed >= 4 * sum(parameter.numel() for parameter in values)
    with offloaded.on_device():
        assert torch.accelerator.memory_allocated() <= before
        for parameter, expected in zip(model.module.parameters(), values, strict=True):
            assert torch.equal(parameter.cpu(), expected)


def test_memory_of_the_host_is_page_locked(machine: Machine) -> None:
    device = machine.device
    memory = HostMemory([1 << 20], device=device)
    hosted = memory.zeros_like(torch.empty(1 << 18))
    assert not hosted.count_nonzero()
    assert hosted.is_pinned() == (device.type != "cpu")
    hosted.copy_(torch.full((1 << 18,), 3.0, device=device), non_blocking=True)
    wait_for(device)
    assert bool((hosted == 3).all())


@pytest.mark.parametrize("refuses", [False, True])
def test_the_device_computes_after_memory_is_returned_or_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    if machine.trial:
        pytest.skip("a CPU registers no memory")
    runtime: Any = torch.cuda.cudart()
    register = runtime.cudaHostRegister

    def register_twice(address: int, num_bytes: int, flags: int) -> object:
        register(address, num_bytes, flags)
        code = register(address, num_bytes, flags)
        runtime.cudaHostUnregister(address)
        return code

    if refuses:
        monkeypatch.setattr(runtime, "cudaHostRegister", register_twice)
    kept = page_locked_zeros(1 << 22, device_type="cuda")
    assert kept.is_pinned()
    del kept
    assert torch.ones(8, device="cuda").sum().item() == 8
