# SPDX-License-Identifier: Apache-2.0
"""Checks of a single device: memory, copies, random numbers, streams, and parts of models."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tandem.testing.contracts.check import (
    Bench,
    Check,
    Measured,
    bounded,
    error_of,
    require,
    require_equal,
)

_COPY_BYTES = 64 * 1024**2
_BF16_ERROR = 2e-2


def device_is_the_one_taken(bench: Bench) -> Measured:
    """Check that a device type without an index means the device in use."""
    platform = bench.here.platform
    require(platform.is_available(), platform.probe())
    found = torch.empty(1, device=platform.device_type).device
    require(found == bench.device, f"a new tensor lies on {found}, not on {bench.device}")
    require(bool(platform.device_name()), "the device has no name")
    require(platform.total_memory_bytes() > 0, "the device has no memory")
    return {}


def tensors_move_and_are_viewed(bench: Bench) -> Measured:
    """Check that copies in both directions keep values, in all dtypes, in views and in place."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        values = torch.arange(60).view(3, 4, 5).to(dtype)
        there = values.to(bench.device)
        require(there.device == bench.device, f"a copy lies on {there.device}")
        require_equal(_cut(there), _cut(values), what=f"a view in {dtype}")
    floats = torch.zeros(8, device=bench.device)
    torch.ops.aten._foreach_copy_(
        list(floats.split(3)), [torch.ones(3), torch.ones(3), torch.ones(2)]
    )
    floats[2:5].mul_(3)
    require_equal(floats, torch.tensor([1.0, 1, 3, 3, 3, 1, 1, 1]), what="copies in place")
    require(floats.sum().item() == 14, "a sum is wrong")
    require(torch.empty(0, device=bench.device).cpu().numel() == 0, "an empty copy has values")
    raw = torch.randn(5, 3).to(bench.device)
    require_equal(raw.view(torch.uint8), raw.cpu().view(torch.uint8), what="bytes of fp32")
    return {}


def _cut(values: Tensor) -> Tensor:
    return values.transpose(0, 2)[1:, ::2].contiguous()


def seeds_repeat(bench: Bench) -> Measured:
    """Check that the same seed draws the same numbers."""
    draws = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        draws.append(torch.rand(100, device=bench.device).cpu())
    require_equal(draws[0], draws[1], what="the same seed")
    require(not torch.equal(draws[0], draws[2]), "another seed draws the same numbers")
    return {}


def autocast_computes_in_bfloat16(bench: Bench) -> Measured:
    """Check that autocast computes matrix products in bf16, with the precision of bf16."""
    left, right = (torch.randn(32, 32, generator=_seeded(seed)) for seed in (0, 1))
    with torch.autocast(bench.device.type, dtype=torch.bfloat16):
        product = left.to(bench.device) @ right.to(bench.device)
    require(product.dtype is torch.bfloat16, f"autocast computed in {product.dtype}")
    return bounded("bf16_matmul", error_of(product.float(), left @ right), limit=_BF16_ERROR)


def memory_is_counted(bench: Bench) -> Measured:
    """Check that the peaks of allocated memory include a living tensor."""
    platform = bench.here.platform
    if not platform.has_own_memory:
        return None
    held = torch.ones(4 * 1024**2, device=bench.device)
    allocated, reserved = platform.memory_allocated_bytes(), platform.memory_reserved_bytes()
    require(held.nbytes <= allocated <= platform.total_memory_bytes(), f"{allocated} allocated")
    require(held.nbytes <= reserved, f"{reserved} reserved")
    return {}


def streams_are_ordered(bench: Bench) -> Measured:
    """Check that a stream that waits for another sees its work, and that its event completes."""
    if bench.is_host:
        return None
    first, second = torch.Stream(bench.device), torch.Stream(bench.device)
    require(first.stream_id != second.stream_id, "two streams have one id")
    with first:
        current = torch.accelerator.current_stream(bench.device)
        require(current.stream_id == first.stream_id, "a stream that was entered is not current")
        values = torch.full((1000,), 2.0, device=bench.device)
    second.wait_stream(first)
    with second:
        values.mul_(3)
        event = second.record_event()
    torch.accelerator.current_stream(bench.device).wait_event(event)
    event.synchronize()
    require(event.query(), "an event that was waited for has not happened")
    require(values.sum().item() == 6000, "work on two streams was done out of order")
    return {}


def copies_are_pinned(bench: Bench) -> Measured:
    """Check copies of page-locked memory in both directions, and measure their rates."""
    if bench.is_host:
        return None
    source = torch.arange(_COPY_BYTES // 8).pin_memory()
    require(source.is_pinned() and not torch.ones(1).is_pinned(), "pinned memory is not recognized")
    there, back = torch.empty_like(source, device=bench.device), torch.empty_like(source)
    back = back.pin_memory()
    seconds = []
    for target, origin in ((there, source), (back, there), (there, source), (back, there)):
        torch.accelerator.synchronize(bench.device)
        start = time.perf_counter()
        target.copy_(origin, non_blocking=True)
        torch.accelerator.synchronize(bench.device)
        seconds.append(time.perf_counter() - start)
    require(torch.equal(back, source), "a copy over and back changed values")
    rates = [_COPY_BYTES / 1e9 / elapsed for elapsed in seconds[-2:]]
    return {"to_device_gb_s": rates[0], "from_device_gb_s": rates[1]}


def state_is_saved_and_loaded(bench: Bench) -> Measured:
    """Check that torch.save keeps a module's state and torch.load puts it on the given device."""
    net = nn.Linear(8, 4).to(bench.device)
    path = bench.folder / f"state-{bench.here.rank}.pt"
    torch.save(net.state_dict(), path)
    for place in (bench.device, torch.device("cpu")):
        loaded = torch.load(path, map_location=place, weights_only=True)
        require(loaded["weight"].device == place, f"loaded onto {loaded['weight'].device}")
        require_equal(loaded["weight"], net.weight.detach().cpu(), what="a saved weight")
    return {}


def attention_matches(bench: Bench) -> Measured:
    """Compare masked attention with grouped heads, and its gradient, with the host's."""
    q, k, v = (torch.randn(2, heads, 16, 8, generator=_seeded(heads)) for heads in (4, 2, 2))
    causal = torch.ones(16, 16, dtype=torch.bool).tril()

    def attend(device: torch.device) -> tuple[Tensor, Tensor]:
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        output = F.scaled_dot_product_attention(
            *leaves, attn_mask=causal.to(device), enable_gqa=True
        )
        output.square().sum().backward()
        assert leaves[0].grad is not None, "attention has a gradient"
        return output, leaves[0].grad

    found, expected = attend(bench.device), attend(torch.device("cpu"))
    pairs = zip(found, expected, strict=True)
    return bounded("attention", max(error_of(*pair) for pair in pairs))


def optimizer_matches(bench: Bench) -> Measured:
    """Compare five steps of AdamW in fp32, with clipped gradients, with the host's."""

    def train(device: torch.device) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 1))
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        x_BD = torch.randn(32, 6, generator=_seeded(1)).to(device)
        for _ in range(5):
            loss = (net(x_BD) - x_BD.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])

    return bounded("adamw", error_of(train(bench.device), train(torch.device("cpu"))))


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CHECKS = (
    Check("device/taken", device_is_the_one_taken),
    Check("device/tensors", tensors_move_and_are_viewed),
    Check("device/seeds", seeds_repeat),
    Check("device/autocast", autocast_computes_in_bfloat16),
    Check("device/memory", memory_is_counted),
    Check("device/streams", streams_are_ordered),
    Check("device/pinned_copies", copies_are_pinned),
    Check("device/save_and_load", state_is_saved_and_loaded),
    Check("device/attention", attention_matches),
    Check("device/optimizer", optimizer_matches),
)
