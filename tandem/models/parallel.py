# SPDX-License-Identifier: Apache-2.0
"""The layout of one model over several processes, as plain values without communication.

Tensor, sequence, expert and pipeline parallelism combine. With tensor parallelism, each process
holds some of the heads and some of the feed-forward width of every layer, as a smaller decoder.
With sequence parallelism (Ulysses), each process computes some of a batch's tokens; with expert
parallelism, it holds some of the experts of every layer; with pipeline parallelism, some layers.
``tensor_regions`` returns the regions of the unsharded tensors that a process of one stage holds,
for loading, weight transport and checkpoints. An engine may shard the rows of these local tensors
further; ``slices_of_rows`` returns the regions of such rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from tandem.config.derived.sizes import division_errors
from tandem.errors import UserError
from tandem.models.adapters import adapter_tensors
from tandem.models.decoder import DecoderConfig, Stage, parameter_shapes
from tandem.models.experts import is_fixed, is_of_all_experts
from tandem.models.families import FAMILIES
from tandem.models.file_tensors import file_tensors
from tandem.models.vision import is_of_tower
from tandem.types import HeldSlice, SliceSpec

SECTION = "actor_rollout_ref.actor.fsdp_config"
"""The usual section of the keys of parallel sizes, for messages."""

_CUT_DIMENSION = {
    ("qkv", "weight"): 0,
    ("qkv", "bias"): 0,
    ("gate_up", "weight"): 0,
    ("gate_up", "bias"): 0,
    ("o", "weight"): 1,
    ("down", "weight"): 1,
    ("qkv", "lora_b"): 0,
    ("gate_up", "lora_b"): 0,
    ("o", "lora_a"): 1,
    ("down", "lora_a"): 1,
    # The maps of latent attention to the heads.
    ("query", "weight"): 0,
    ("heads", "weight"): 0,
}
"""The dimensions that tensor parallelism splits. Every process holds all other parameters whole."""


@dataclass(frozen=True, slots=True)
class PlainParameters:
    """The parameters of a model that transformers' code computes.

    They are only sharded along their rows, and all of them are trained.

    Attributes:
        shapes: the shapes of the whole parameters by name, in order.
        num_layers: the number of layers that can be divided into stages.
    """

    shapes: Mapping[str, tuple[int, ...]]
    adapters: None = None
    freezes_tower: bool = False
    num_layers: int = 0

    def is_unsharded(self, name: str) -> bool:
        """Return False: every rank holds some of the rows of each parameter."""
        return False

    def is_changed(self, name: str) -> bool:
        """Return True: an optimizer changes each parameter."""
        return True


Architecture = DecoderConfig | PlainParameters
"""What says which tensors a model has."""

Regions = tuple[SliceSpec, ...]
"""The regions of an unsharded tensor that form a local tensor, stacked along the rows. A part of a
fused matrix has several, which are not adjacent in the whole."""


@dataclass(frozen=True, slots=True)
class Peers:
    """The processes that divide a model or a batch, and the rank of this process.

    Attributes:
        group: None if there are no other processes, or if they are the default world.
    """

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


ALONE = Peers()


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The processes that share a model.

    Attributes:
        tensor: those that share heads and widths of the layers.
        sequence: those that share the tokens of a micro-batch.
        expert: those that share the experts of a layer; each may have tokens of its own.
        stage: the layers of this process; None for all.
    """

    tensor: Peers = ALONE
    sequence: Peers = ALONE
    expert: Peers = ALONE
    stage: Stage | None = None


WHOLE = ParallelLayout()


def peers_of(mesh: DeviceMesh) -> Peers:
    """Return the processes of a one-dimensional mesh."""
    return Peers(mesh.get_local_rank(), mesh.size(), mesh.get_group())


def check_layout(
    config: DecoderConfig | None, *, tensor: int, sequence: int, section: str = SECTION
) -> None:
    """Raise UserError unless the sizes divide the model's heads and widths.

    Args:
        config: None if transformers' code computes the model.
        section: the section of the keys of parallel sizes, for messages.
    """
    if config is not None:
        for error in division_errors(
            config.num_heads,
            config.num_kv_heads,
            inner=config.intermediate_size,
            tensor=tensor,
            sequence=sequence,
            section=section,
        ):
            raise error
        return
    sizes = {"tensor_model_parallel_size": tensor, "ulysses_sequence_parallel_size": sequence}
    for name, size in sizes.items():
        if size > 1:
            raise UserError(
                f"{section}.{name}",
                size,
                rule="this model cannot be split, because transformers' code computes it",
                remedy=f"Use 1 or a model of {', '.join(FAMILIES)}.",
            )


def local_config(config: DecoderConfig, size: int) -> DecoderConfig:
    """Return the configuration of the decoder of each of ``size`` tensor-parallel processes."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def whole_config(local: DecoderConfig, size: int) -> DecoderConfig:
    """Return the configuration of the unsharded decoder, the inverse of ``local_config``."""
    return replace(
        local,
        num_heads=local.num_heads * size,
        num_kv_heads=local.num_kv_heads * size,
        intermediate_size=local.intermediate_size * size,
    )


def tensor_regions(
    config: Architecture,
    *,
    rank: int,
    size: int,
    dtype: torch.dtype,
    experts: Peers = ALONE,
    groups_heads: bool = False,
) -> dict[str, Regions]:
    """Return the regions of tensor-parallel process ``rank`` of ``size``, by parameter in order.

    Args:
        config: the configuration of the unsharded decoder, or the parameters of another model,
            which is not split.
        experts: the processes that divide the experts.
        groups_heads: whether the local tensors have the queries of a key, the key and its value
            after each other, as in Megatron.
    """
    if isinstance(config, PlainParameters):
        return {
            name: (SliceSpec(name, dtype, shape, (0,) * len(shape), shape),)
            for name, shape in config.shapes.items()
        }
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for part in (*file_tensors(config), *adapter_tensors(config)):
        spans[part.parameter].append((part.start, part.rows))
    regions: dict[str, Regions] = {}
    for name, shape in parameter_shapes(config).items():
        own = torch.float32 if is_fixed(name) else dtype
        whole = SliceSpec(name, own, shape=shape, offset=(0,) * len(shape), size=shape)
        if is_of_all_experts(name):
            held = shape[0] // experts.size
            regions[name] = (_narrow(whole, 0, start=experts.rank * held, count=held),)
            continue
        if groups_heads and _kind(name)[0] == "qkv":
            heads = _heads_by_group(config, rank=rank, size=size)
            regions[name] = tuple(_narrow(whole, 0, start=x, count=n) for x, n in heads)
            continue
        dimension = None if is_of_tower(name) else _CUT_DIMENSION.get(_kind(name))
        if config.norm_spans_heads and _kind(name)[0] in ("q_norm", "k_norm"):
            dimension = 0
        if size == 1 or dimension is None:
            regions[name] = (whole,)
            continue
        cuts = spans[name] if dimension == 0 else [(0, shape[1])]
        regions[name] = tuple(
            _narrow(whole, dimension, start=start + rank * (count // size), count=count // size)
            for start, count in cuts
        )
    return regions


def _heads_by_group(config: DecoderConfig, *, rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield first row and number of rows of each part of query, key and value in Megatron."""
    heads, keys, width = config.num_heads, config.num_kv_heads, config.head_dim
    queries = heads // keys
    for key in range(rank * keys // size, (rank + 1) * keys // size):
        yield key * queries * width, queries * width
        yield (heads + key) * width, width
        yield (heads + keys + key) * width, width


def is_whole(regions: Regions) -> bool:
    """Return whether a process holds the whole tensor, as then all do."""
    return regions[0].size == regions[0].shape


def slices_of_rows(regions: Regions, rows: Tensor, *, first_row: int = 0) -> list[HeldSlice]:
    """Return the regions that form some rows of a local tensor, with views of those rows.

    Args:
        regions: the regions of the local tensor.
        rows: rows ``first_row .. first_row + len(rows)`` of the local tensor, possibly none.
    """
    slices, begin = [], 0
    for region in regions:
        start = max(first_row, begin)
        stop = min(first_row + len(rows), begin + region.size[0])
        if start < stop:
            view = rows.detach()[start - first_row : stop - first_row]
            offset = (region.offset[0] + start - begin, *region.offset[1:])
            spec = replace(region, dtype=view.dtype, offset=offset, size=tuple(view.shape))
            slices.append(HeldSlice(spec, view))
        begin += region.size[0]
    return slices


def _kind(name: str) -> tuple[str, str]:
    """Return ``("qkv", "weight")`` for ``layers.3.qkv.weight``."""
    *_, module, parameter = name.split(".")
    return module, parameter


def _narrow(region: SliceSpec, dimension: int, *, start: int, count: int) -> SliceSpec:
    offset, size = list(region.offset), list(region.size)
    offset[dimension], size[dimension] = start, count
    return replace(region, offset=tuple(offset), size=tuple(size))
