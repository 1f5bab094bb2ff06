# SPDX-License-Identifier: Apache-2.0
"""The regions of a decoder's parameters that each rank holds, and the gather of whole tensors.

A process's part of a parameter is one or more regions of the whole, stacked along the rows: all
rows of an unsharded parameter, some rows of a sharded one, and a region each of query, key and
value if a fused matrix is split by heads.

The tensor-parallel rank varies fastest, then the shard, then the replica. The same ranks also
divide, after the tensor-parallel rank, into sequence-parallel and then data-parallel ranks. A shard
is a range of rows of a tensor-parallel share, as in ``torch.chunk``: the last shards may be
smaller, or empty. Parameters that training never changes are not sharded.
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
from tandem.models.adapted import trained_names
from tandem.models.decoder import DecoderConfig
from tandem.models.experts import is_fixed
from tandem.models.parallel import Regions, is_whole, slices_of_rows, tensor_regions
from tandem.types import SliceSpec


class ShardMap(Protocol):
    """The parts of all parameters that one process holds."""

    @property
    def regions(self) -> Mapping[str, Regions]:
        """The regions of each parameter, in order; () for a parameter without a part here."""
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
    """

    tensor: int
    shard: int
    copy: int
    sequence: int
    data: int


def place_of(layout: RankLayout, rank: int) -> RankPlace:
    """Return the coordinates of ``rank``.

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
        name: regions
        if is_fixed(name)
        else _shard_of(regions, place.shard, num_shards=layout.num_shards)
        for name, regions in shares.items()
    }


class RankShardMap:
    """The ``ShardMap`` of one rank of a pool, of the trained parameters.

    Attributes:
        regions: the regions of this rank.
        shares: the regions of this rank's tensor-parallel share, before sharding.

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
        self.regions: Mapping[str, Regions] = _trained(
            regions_of_rank(config, layout, rank=rank, dtype=dtype)
        )
        self._group = group
        tensor, size = self.place.tensor, layout.tensor_parallel
        self.shares = _trained(tensor_regions(config, rank=tensor, size=size, dtype=dtype))
        members = range(layout.num_shards * layout.tensor_parallel)
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


def _trained(regions: Mapping[str, Regions]) -> dict[str, Regions]:
    return {name: regions[name] for name in trained_names(regions)}


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
