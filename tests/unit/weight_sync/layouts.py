# SPDX-License-Identifier: Apache-2.0
"""A small set of weights, and the ways in which processes hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.handshake import LinkPlace, LinkSettings, LinkTensors

CPU = torch.device("cpu")
MODES: list[dict[str, Any]] = [
    {"staged": staged, "double_buffered": double}
    for staged in (False, True)
    for double in (False, True)
]
"""The ways of updating weights."""
KEPT_IN_FP32 = ("norm", "scale")
"""What a rollout in bf16 needs in full precision."""


def tied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same with one storage under two names, as where embedding and head are one."""
    return weights | {"tied": weights["embed"]}


def make_weights(rows: int = 50, *, seed: int = 0) -> dict[str, Tensor]:
    """Named fp32 tensors of all sorts: odd sizes, a scalar, an empty one, three dimensions.
    ``rows`` is the size of the largest."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (rows, 48),
        "norm": (33,),
        "experts": (3, 10, 7),
        "scale": (),
        "empty": (0, 5),
        "bias": (1,),
        "head": (17, 9),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def held(name: str, tensor: Tensor, *, whole: Sequence[int], offset: Sequence[int]) -> HeldSlice:
    """``tensor`` as the slice of a tensor of shape ``whole`` that begins at ``offset``."""
    spec = SliceSpec(name, tensor.dtype, tuple(whole), tuple(offset), tuple(tensor.shape))
    return HeldSlice(spec, tensor)


def cut(weights: dict[str, Tensor], grid: tuple[int, int], *, rank: int) -> list[HeldSlice]:
    """Rank ``rank`` of a grid: rows are cut in ``grid[0]`` parts as FSDP2 does, then columns in
    ``grid[1]``, as views that are not contiguous. What has no such dimension is held by several."""
    row, column = divmod(rank, grid[1])
    slices: list[HeldSlice] = []
    for name, whole in weights.items():
        tensor, offset = whole, [0] * whole.dim()
        for dimension, (index, count) in enumerate([(row, grid[0]), (column, grid[1])]):
            if dimension < whole.dim():
                size = whole.shape[dimension]
                per_rank = -(-size // count)
                start = min(index * per_rank, size)
                offset[dimension] = start
                tensor = tensor.narrow(dimension, start, min(per_rank, size - start))
        slices.append(held(name, tensor, whole=whole.shape, offset=offset))
    return slices


def empty_copy(
    weights: dict[str, Tensor], dtype: torch.dtype, grid: tuple[int, int] = (1, 1), *, rank: int = 0
) -> list[HeldSlice]:
    """Room for what ``rank`` of a ``grid`` holds, in mixed precision; matrices are stored
    transposed, and tied ones once."""
    slices: list[HeldSlice] = []
    rooms: dict[int, Tensor] = {}
    for part in cut(weights, grid, rank=rank):
        name, size = part.spec.name, part.spec.size
        kind = torch.float32 if name in KEPT_IN_FP32 else dtype
        room = torch.full(tuple(reversed(size)), 77.0, dtype=kind).permute(
            tuple(reversed(range(len(size))))
        )
        room = rooms.setdefault(id(weights[name]), room)
        slices.append(held(name, room, whole=part.spec.shape, offset=part.spec.offset))
    return slices


def check_arrived(slices: Sequence[HeldSlice], weights: dict[str, Tensor]) -> None:
    """Bit by bit what the sender's weights are in the receiver's precision."""
    for slice_ in slices:
        name, tensor, spec = slice_.spec.name, slice_.tensor, slice_.spec
        box = [slice(start, start + n) for start, n in zip(spec.offset, spec.size, strict=True)]
        expected = weights[name][tuple(box)].to(tensor.dtype)
        assert tensor.shape == expected.shape, name
        same = (
            tensor.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(expected.contiguous().view(-1).view(torch.uint8))
        )
        assert same, f"{name} differs"


def place(rank: int, size: int, *, name: str = "weights") -> LinkPlace:
    """On the CPU."""
    return LinkPlace(name=name, rank=rank, size=size, role=f"process {rank}", device=CPU)


def settings(
    send_bytes: int = 1 << 20, receive_bytes: int = 1 << 20, **others: object
) -> LinkSettings:
    """Make settings with buckets in bytes, and a minute for everything."""
    return LinkSettings(
        **{
            "send_bucket_bytes": send_bytes,
            "receive_bucket_bytes": receive_bytes,
            "timeout_s": 60.0,
            **others,
        }
    )


def sending(slices: Sequence[HeldSlice]) -> LinkTensors:
    """Of a process that only sends."""
    return LinkTensors(sends=constant(slices))


def receiving(slices: Sequence[HeldSlice]) -> LinkTensors:
    """Of a process that only receives."""
    return LinkTensors(receives=constant(slices))


def constant(slices: Sequence[HeldSlice]) -> Callable[[], Sequence[HeldSlice]]:
    """Always the same slices."""
    return lambda: slices
