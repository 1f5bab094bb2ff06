# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a device that is not there, with the arguments of their callers.

    python -m tests.fakes.compiled_kernels

Prints a JSON object: the name of each kernel, and the most bytes of shared memory that a program of
it takes. Every launch is replaced by a compilation, so that results are whatever the memory held.
Tests with Triton's interpreter compare results; they accept programs that no compiler accepts.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tandem.config.derived.experts import ExpertConfig
from tandem.models.kernels.gather import Gather
from tandem.models.kernels.operators import TRITON
from tandem.models.quantized_operators import HeadLayout, Product
from tandem.rollout.paged.cache import (
    HEAD_DIMS,
    PAGE_TOKENS,
    LayerCache,
    PageDivision,
    RowState,
    RowTables,
    Tiles,
)
from tandem.rollout.paged.kernels.attention import decode_attention, divide_pages
from tandem.rollout.paged.kernels.sampling import KernelDraws
from tandem.rollout.paged.kernels.tiles import attend_tiles
from tandem.rollout.sampler import DrawRule

TARGET = GPUTarget("cuda", 90, 32)
"""NVIDIA's Hopper; the compiler is part of triton."""
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
}
COMPILED: dict[str, int] = {}
"""The name of each kernel -> the most bytes of shared memory that a program of it takes."""


def compile_launch(
    kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any
) -> None:
    """Compile a kernel as Triton would for these arguments."""
    del grid, warmup
    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    given = inspect.signature(kernel.fn).bind(*args, **kwargs).arguments
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value, is_fixed = given[parameter.name], parameter.do_not_specialize
        if parameter.is_constexpr or (type(value) is int and value == 1 and not is_fixed):
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            is_aligned = value.data_ptr() % 16 == 0
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            is_aligned = isinstance(value, int) and value % 16 == 0 and not is_fixed
        if is_aligned:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGET, options=options)
    assert compiled.asm["cubin"]
    name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
    COMPILED[name] = max(compiled.metadata.shared, COMPILED.get(name, 0))


def bf16(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes).bfloat16().requires_grad_()


def train() -> None:
    """The kernels of training: forward and backward passes."""
    x_TD, weight_D = bf16(5, 256), bf16(256)
    for delta_TD in (None, bf16(5, 256)):
        sum(TRITON.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=1e-6)).sum().backward()
    heads_TME = bf16(5, 6, 128)
    angles = (torch.randn(5, 1, 128), torch.randn(5, 1, 128))
    TRITON.rotate(heads_TME, angles).sum().backward()
    norms = {"q_weight_E": bf16(128), "k_weight_E": bf16(128)}
    TRITON.norm_heads(heads_TME, 4, **norms, eps=1e-6).sum().backward()
    TRITON.gate(bf16(5, 512)).sum().backward()
    TRITON.add_into(torch.zeros(1000), bf16(1000).detach())
    Gather(np.array([0, 0, 2]), 3, device=torch.device("cpu"))(bf16(3, 64)).sum().backward()
    scores = TRITON.token_log_probs(
        bf16(4, 64),
        bf16(3000, 64),
        target_R=torch.arange(4),
        temperature=1.0,
        with_entropy=True,
    )
    (scores.logp_R + scores.entropy_R).sum().backward()
    TRITON.experts(**experts()).sum().backward()


def experts() -> dict[str, torch.Tensor]:
    """Return the arguments of a layer of 4 experts, of which 2 compute a token."""
    return {
        "h_TD": bf16(16, 256),
        "expert_TK": torch.tensor([[0, 1], [2, 3]] * 8),
        "weight_TK": torch.rand(16, 2).requires_grad_(),
        "gate_up_E2FD": bf16(4, 256, 256),
        "down_EDF": bf16(4, 256, 128),
    }


@torch.inference_mode()
def generate() -> None:
    """The kernels of generation."""
    TRITON.experts(**experts())
    config = ExpertConfig(num_experts=8, num_chosen=2, inner=128, is_renormalized=True)
    TRITON.route(bf16(5, 256), bf16(8, 256), config=config, correction_E=None)
    rules = (DrawRule(1.0, -1, 1.0), DrawRule(0.7, 5, 0.9))
    KernelDraws()(bf16(2, 3000), torch.rand(2), rules=rules, forced={})
    state = RowState.allocate(2, torch.device("cpu"))
    state.numbers[:, RowState.ACTIVE] = 1
    sizes = {"num_heads": 4, "head_dim": 128}
    division = PageDivision.allocate(2, 3, **sizes, device=torch.device("cpu"))
    rows = RowTables(
        torch.zeros(2, 1, dtype=torch.int32),
        state.numbers[:, RowState.POSITION],
        state.numbers[:, RowState.ACTIVE],
        state.numbers[:, RowState.SHARED],
        division,
    )
    cache = LayerCache(*(bf16(3, 2, PAGE_TOKENS, 128) for _ in range(2)))
    q_BHE, k_BKE, v_BKE = bf16(2, 4, 128), bf16(2, 2, 128), bf16(2, 2, 128)
    tiles = Tiles.allocate(2, rows_of_tile=32, **sizes, device=torch.device("cpu"))
    for some in (rows, replace(rows, tiles=tiles)):
        divide_pages(some)
        decode_attention(q_BHE, k_BKE, v_BKE=v_BKE, cache=cache, rows=some)
    for head_dim, dtype in product(HEAD_DIMS, (torch.bfloat16, torch.float32)):
        if (head_dim, dtype) == (256, torch.float32):
            continue  # attention without tiles takes as much, and few devices have it
        pages = [torch.randn(3, 2, PAGE_TOKENS, head_dim).to(dtype) for _ in range(2)]
        q_BHE = torch.randn(2, 14, head_dim).to(dtype)
        attend_tiles(q_BHE, LayerCache(*pages), rows=rows, tiles=tiles, num_programs=3)


@torch.inference_mode()
def generate_quantized() -> None:
    """The kernels of generation in fp8."""
    ours, weight_D = TRITON.quantized, bf16(256)
    deltas = (None, bf16(5, 256), Product(bf16(5, 256), torch.rand(5)))
    for delta in deltas:
        ours.add_norm(torch.randn(5, 256), delta, weight_D=weight_D, eps=1e-6)
    ours.last_norm(torch.randn(5, 256), deltas[2], weight_D=weight_D, eps=1e-6)
    ours.gate(Product(bf16(5, 512), torch.rand(5)))
    angles = (bf16(5, 1, 64), bf16(5, 1, 64))
    for norms in ((None, None), (bf16(64), bf16(64))):
        layout = HeadLayout(4, 2, 64, bf16(512), *norms, 1e-6)
        ours.heads(Product(bf16(5, 512), torch.rand(5)), layout, angles=angles)


def main() -> None:
    """Compile all of them."""
    JITFunction.run = compile_launch
    train()
    generate()
    generate_quantized()
    json.dump(COMPILED, sys.stdout, sort_keys=True)


if __name__ == "__main__":
    main()
