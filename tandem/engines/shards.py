# SPDX-License-Identifier: Apache-2.0
"""The regions of a decoder's parameters that each rank holds, and whole tensors from all parts.

A process's part of a parameter is one or more regions of the whole, stacked along the rows: one
region of all rows if it is not sharded, of some rows if it is, and one region each for query, key
and value if a fused matrix is split between heads.

Ranks are numbered by tensor-parallel rank first, then by shard, then by replica. The same ranks
divide, again after the tensor-parallel rank, into sequence-parallel neighbours and then into
data-parallel groups. A shard is a run of rows of a tensor-parallel share, cut as ``torch.chunk``
cuts: the last shards may be smaller, or empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from tandem.config.derived.pools import RankLayout
from tandem.models.decoder import DecoderConfig
from tandem.models.parallel import Regions, is_whole, slices_of_rows, tensor_regions
from tandem.types import SliceSpec


class ShardMap(Protocol):
    """The parts of all parameters that one process holds."""

    @property
    def regions(self) -> Mapping[str, Regions]:
        """The regions of all parameters in order, without any if this process has no part."""
        ...

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return the whole of a tensor shaped like parameter ``name``.

        Collective: all processes that share the parameter call it for the same names in order.

        Args:
            part: the part of the tensor that this process holds.
        """
        ...


@dataclass(frozen=True, slots=True)
class UnshardedMap:
    """The ``ShardMap`` of a process that holds all parameters whole."""

    regions: Mapping[str, Regions]

    def gather(self, name: str, part: Tensor) -> Tensor:
        """Return the part itself."""
        return part


def unsharded_map(parameters: Mapping[str, Tensor]) -> UnshardedMap:
    """Return a map with one region for each parameter, which covers it."""
    regions = {}
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        regions[name] = (SliceSpec(name, tensor.dtype, shape, (0,) * len(shape), shape),)
    return UnshardedMap(regions)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The coordinates of a rank in each division of a pool.

    Attributes:
        tensor: the coordinate among the ranks that split each matrix.
        shard: the coordinate among the ranks that the rows of a share are spread over.
        copy: the coordinate among the replicas.
        sequence: the coordinate among the ranks that share the tokens of a micro-batch.
        data: the number of this rank's micro-batch within a round.
    """

    tensor: int
    shard: int
    copy: int
    sequence: int
    data: int


def place_of(layout: RankLayout, rank: int) -> RankPlace:
    """Return the place of ``rank``.

    Example:
        >>> place_of(RankLayout(8, tensor_parallel=2, sequence_parallel=2, num_shards=2), 5)
        RankPlace(tensor=1, shard=0, copy=1, sequence=0, data=1)
    """
    row, tensor = divmod(rank, layout.tensor_parallel)
    copy, shard = divmod(row, layout.num_shards)
    data, sequence = divmod(row, layout.sequence_parallel)
    return RankPlace(tensor, shard, copy=copy, sequence=sequence, data=data)


def regions_of_rank(
    config: DecoderConfig, layout: RankLayout, *, rank: int, dtype: torch.dtype
) -> dict[str, Regions]:
    """Return the regions that ``rank`` holds of the decoder of ``config``."""
    place = place_of(layout, rank)
    shares = tensor_regions(config, rank=place.tensor, size=layout.tensor_parallel, dtype=dtype)
    return {
        name: _shard_of(regions, place.shard, num_shards=layout.num_shards)
        for name, regions in shares.items()
    }


class RankShardMap:
    """The ``ShardMap`` of one rank of a pool.

    Attributes:
        regions: the regions of this rank.
        shares: the regions of this rank together with the ranks that it is sharded with.

    Args:
        config: the configuration of the unsharded decoder.
        group: the ranks of this rank's replica in order; None for the default world.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layout: RankLayout,
        *,
        rank: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
    ) -> None:
        self.place = place_of(layout, rank)
        self.regions: Mapping[str, Regions] = regions_of_rank(
            config, layout, rank=rank, dtype=dtype
        )
        self._group = group
        tensor, size = self.place.tensor, layout.tensor_parallel
        self.shares = tensor_regions(config, rank=tensor, size=size, dtype=dtype)
        members = range(layout.num_shards * layout.tensor_parallel)
        self._members = [regions_of_rank(config, layout, rank=r, dtype=dtype) for r in members]

    def is_owner(self, name: str) -> bool:
        """Return whether sums over all ranks include this rank's part.

        Of several ranks that hold the same part, one is its owner.
        """
        is_cut = not is_whole(self.shares[name])
        return self.place.copy == 0 and (self.place.tensor == 0 or is_cut)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """See ``ShardMap.gather``. All ranks of a replica take part."""
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


def with_first_rows(regions: Regions) -> Iterator[tuple[int, SliceSpec]]:
    """Yield each region of a part with the row of the part at which it begins."""
    at = 0
    for region in regions:
        yield at, region
        at += region.size[0]


def view_of(whole: Tensor, region: SliceSpec) -> Tensor:
    """Return the view of a whole tensor that a region describes."""
    for dimension, (offset, size) in enumerate(zip(region.offset, region.size, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole


def _shard_of(regions: Regions, shard: int, *, num_shards: int) -> Regions:
    """Return the rows of a share that form one shard of it."""
    num_rows = sum(region.size[0] for region in regions)
    length = -(-num_rows // num_shards)
    first, last = (min(length * edge, num_rows) for edge in (shard, shard + 1))
    rows = torch.empty((last - first, *regions[0].size[1:]), dtype=regions[0].dtype, device="meta")
    return tuple(held.spec for held in slices_of_rows(regions, rows, first_row=first))
