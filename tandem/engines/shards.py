# SPDX-License-Identifier: Apache-2.0
"""The regions of a decoder's parameters that each rank holds, and the gather of whole tensors.

A process's part of a parameter is one or more regions of the whole, stacked along the rows: all
rows, some rows, or a region each of query, key and value if a fused matrix is split by heads.

The tensor-parallel rank varies fastest, then the shard, then the replica, then the stage. The same
ranks also divide into sequence-parallel and then data-parallel ranks. Consecutive ranks divide
experts. A
shard is a range of rows of such a share, as in ``torch.chunk``: the last shards may be smaller, or
empty. Parameters that training never changes are not sharded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from tandem.config.derived.pools import RankLayout
from tandem.models.adapted import trained_names
from tandem.models.experts import is_fixed, is_of_all_experts
from tandem.models.parallel import (
    Architecture,
    Peers,
    Regions,
    is_whole,
    slices_of_rows,
    tensor_regions,
)
from tandem.types import SliceSpec


class ShardMap(Protocol):
    """The parts of all parameters that one process holds."""

    @property
    def names(self) -> Collection[str]:
        """The names of all trained parameters, in order, those of other stages too."""
        ...

    @property
    def regions(self) -> Mapping[str, Regions]:
        """The regions of each parameter of this stage, in order; () without a part here."""
        ...

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a tensor shaped like parameter ``name``.

        Collective: all processes that share the parameter call it for the same names in order, each
        with its own ``part``.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnshardedMap:
    """The ``ShardMap`` of a process that holds all parameters whole."""

    regions: Mapping[str, Regions]

    @property
    def names(self) -> Collection[str]:
        return self.regions

    def gather(self, name: str, part: Tensor) -> Tensor:
        return part


def unsharded_map(parameters: Mapping[str, Tensor]) -> UnshardedMap:
    """Return a map with one region per parameter, which covers it."""
    regions = {}
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        regions[name] = (SliceSpec(name, tensor.dtype, shape, (0,) * len(shape), shape),)
    return UnshardedMap(regions)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The coordinates of a rank in a pool.

    Attributes:
        tensor: the coordinate among the ranks that split each matrix.
        shard: the coordinate among the ranks that divide the rows of a tensor-parallel share.
        copy: the coordinate among the replicas.
        sequence: the coordinate among the ranks that share the tokens of a micro-batch.
        data: the number of this rank's micro-batch within a round.
        expert: the coordinate among the ranks that divide the experts.
        expert_shard: the coordinate among the ranks of a copy that hold the same experts.
        stage: the number of its stage of layers.
    """

    tensor: int
    shard: int
    copy: int
    sequence: int
    data: int
    expert: int
    expert_shard: int
    stage: int


def place_of(layout: RankLayout, rank: int) -> RankPlace:
    """Return the coordinates of ``rank``.

    Example:
        >>> place_of(RankLayout(8, tensor_parallel=2, sequence_parallel=2, num_shards=2), 5)
        RankPlace(tensor=1, shard=0, copy=1, sequence=0, data=1, expert=0, expert_shard=0, stage=0)
    """
    stage, rank = divmod(rank, layout.ranks_per_stage)
    row, tensor = divmod(rank, layout.tensor_parallel)
    copy, shard = divmod(row, layout.num_shards)
    data, sequence = divmod(row, layout.sequence_parallel)
    expert_shard, expert = divmod(rank % layout.ranks_per_copy, layout.expert_parallel)
    return RankPlace(
        tensor,
        shard,
        copy=copy,
        sequence=sequence,
        data=data,
        expert=expert,
        expert_shard=shard if layout.expert_parallel == 1 else expert_shard,
        stage=stage,
    )


def regions_of_rank(
    config: Architecture, layout: RankLayout, *, rank: int, dtype: torch.dtype
) -> dict[str, Regions]:
    """Return the regions that ``rank`` holds of the model of ``config``, of all stages alike."""
    place = place_of(layout, rank)
    found: dict[str, Regions] = {}
    for name, regions in _shares(config, layout, place=place, dtype=dtype).items():
        if config.is_unsharded(name):
            found[name] = regions
        elif is_of_all_experts(name):
            number = layout.num_expert_shards
            found[name] = _shard_of(regions, place.expert_shard, num_shards=number)
        else:
            found[name] = _shard_of(regions, place.shard, num_shards=layout.num_shards)
    return found


def _shares(
    config: Architecture, layout: RankLayout, *, place: RankPlace, dtype: torch.dtype
) -> dict[str, Regions]:
    """Return the regions of a process of tensor and expert parallelism, before sharding."""
    return tensor_regions(
        config,
        rank=place.tensor,
        size=layout.tensor_parallel,
        dtype=dtype,
        experts=Peers(place.expert, layout.expert_parallel),
        groups_heads=layout.groups_heads,
    )


class RankShardMap:
    """The ``ShardMap`` of one rank of a pool, of the trained parameters of its stage.

    A tied embedding belongs to the first stage. The last one computes with a copy of it.

    Attributes:
        names: the trained parameters of all stages.
        regions: the regions of this rank.
        shares: the regions of this rank's share of tensor and expert parallelism, before sharding;
            of all stages.

    Args:
        config: the configuration of the unsharded decoder, or the parameters of another model.
        group: the ranks of this rank's replica in order; None for the default world.
    """

    def __init__(
        self,
        config: Architecture,
        layout: RankLayout,
        *,
        rank: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
    ) -> None:
        self.place = place_of(layout, rank)
        own = regions_of_rank(config, layout, rank=rank, dtype=dtype)
        self.names = trained_names(own, freezes_tower=config.freezes_tower)
        stage_of = partial(_stage_of, stages=layout.layers_of_stages(config.num_layers))
        is_whole_model = layout.pipeline_parallel == 1
        self.regions: Mapping[str, Regions] = {
            name: own[name]
            for name in self.names
            if is_whole_model or stage_of(name) == self.place.stage
        }
        self._group = group
        shares = _shares(config, layout, place=self.place, dtype=dtype)
        self.shares = {name: shares[name] for name in self.names}
        members = range(layout.ranks_per_copy)
        self._members = [regions_of_rank(config, layout, rank=r, dtype=dtype) for r in members]

    def is_owner(self, name: str) -> bool:
        """Return whether sums over all ranks include this rank's part: once for all its holders."""
        is_cut = not is_whole(self.shares[name])
        is_first = self.place.copy == 0 and not (is_fixed(name) and self.place.shard)
        return is_first and (self.place.tensor == 0 or is_cut)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """See ``ShardMap.gather``; collective over all ranks of a replica."""
        sizes = [sum(prod(region.size) for region in regions[name]) for regions in self._members]
        sent = part.new_zeros(max(sizes))
        sent[: part.numel()] = part.flatten()
        received = [torch.empty_like(sent) for _ in sizes]
        distributed.all_gather(received, sent, group=self._group)
        whole = part.new_empty(self.shares[name][0].shape)
        for regions, size, flat in zip(self._members, sizes, received, strict=True):
            rows = flat[:size].view(-1, *part.shape[1:])
            for held in slices_of_rows(regions[name], rows):
                view_of(whole, held.spec).copy_(held.tensor)
        return whole


def _stage_of(name: str, *, stages: Sequence[range]) -> int:
    """Return the stage to which a parameter belongs."""
    part, *rest = name.split(".")
    if part == "layers":
        index = int(rest[0])
        return next(stage for stage, layers in enumerate(stages) if index in layers)
    return 0 if part in ("embedding", "tower") else len(stages) - 1


def with_first_rows(regions: Regions) -> Iterator[tuple[int, SliceSpec]]:
    """Yield each region of a part after the part's row at which it starts."""
    at = 0
    for region in regions:
        yield at, region
        at += region.size[0]


def view_of(whole: Tensor, region: SliceSpec) -> Tensor:
    """Return the view of ``region`` in a whole tensor."""
    for dimension, (offset, size) in enumerate(zip(region.offset, region.size, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole


def _shard_of(regions: Regions, shard: int, *, num_shards: int) -> Regions:
    num_rows = sum(region.size[0] for region in regions)
    length = -(-num_rows // num_shards)
    first, last = (min(length * edge, num_rows) for edge in (shard, shard + 1))
    rows = torch.empty((last - first, *regions[0].size[1:]), dtype=regions[0].dtype, device="meta")
    return tuple(held.spec for held in slices_of_rows(regions, rows, first_row=first))
