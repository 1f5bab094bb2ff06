# SPDX-License-Identifier: Apache-2.0
"""What each rank of a pool holds of a decoder, and whole tensors from the ranks' parts.

Ranks are counted by tensor-parallel rank first, then by shard, then by copy; the same ranks, again
after the tensor-parallel one, divide into sequence-parallel neighbours and then data-parallel
groups. A shard is a run of rows of the tensor-parallel share, cut as ``torch.chunk`` cuts: the last
shards may be smaller, or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from tandem.config.derived.pools import RankLayout
from tandem.engines.slices import in_whole
from tandem.models.decoder import DecoderConfig
from tandem.models.parallel import Boxes, is_whole, slices_of_rows, tensor_boxes


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands along each way a pool is divided.

    Attributes:
        tensor: which of those that split each matrix.
        shard: which of those that the rows of a share are spread over.
        copy: which of those that hold the same.
        sequence: which of those that share the tokens of a micro-batch.
        data: which micro-batch of a round is this rank's.
    """

    tensor: int
    shard: int
    copy: int
    sequence: int
    data: int


def place_of(layout: RankLayout, rank: int) -> RankPlace:
    """The place of ``rank``.

    Example:
        >>> place_of(RankLayout(8, tensor_parallel=2, sequence_parallel=2, num_shards=2), 5)
        RankPlace(tensor=1, shard=0, copy=1, sequence=0, data=1)
    """
    row, tensor = divmod(rank, layout.tensor_parallel)
    copy, shard = divmod(row, layout.num_shards)
    data, sequence = divmod(row, layout.sequence_parallel)
    return RankPlace(tensor, shard, copy=copy, sequence=sequence, data=data)


def boxes_of(
    config: DecoderConfig, layout: RankLayout, *, rank: int, dtype: torch.dtype
) -> dict[str, Boxes]:
    """The boxes that ``rank`` holds of the decoder of ``config``."""
    place = place_of(layout, rank)
    shares = tensor_boxes(config, rank=place.tensor, size=layout.tensor_parallel, dtype=dtype)
    return {
        name: _shard_of(boxes, place.shard, num_shards=layout.num_shards)
        for name, boxes in shares.items()
    }


class ShardHolding:
    """``slices.Holding`` of one rank.

    Attributes:
        boxes: of this rank.
        shares: the boxes of this rank and those that it is sharded with.

    Args:
        config: of the whole decoder.
        group: the ranks of this rank's copy in order; None if they are the default world.
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
        self.boxes: Mapping[str, Boxes] = boxes_of(config, layout, rank=rank, dtype=dtype)
        self._group = group
        tensor, size = self.place.tensor, layout.tensor_parallel
        self.shares = tensor_boxes(config, rank=tensor, size=size, dtype=dtype)
        members = range(layout.num_shards * layout.tensor_parallel)
        self._members = [boxes_of(config, layout, rank=r, dtype=dtype) for r in members]

    def counts(self, name: str) -> bool:
        """Whether this rank's part counts in sums over all ranks: others may hold the same."""
        is_cut = not is_whole(self.shares[name])
        return self.place.copy == 0 and (self.place.tensor == 0 or is_cut)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """See ``slices.Holding.whole``; all ranks of a copy take part."""
        sizes = [sum(prod(box.size) for box in boxes[name]) for boxes in self._members]
        sent = part.new_zeros(max(sizes))
        sent[: part.numel()] = part.flatten()
        received = [torch.empty_like(sent) for _ in sizes]
        distributed.all_gather(received, sent, group=self._group)
        whole = part.new_empty(self.shares[name][0].shape)
        for boxes, size, flat in zip(self._members, sizes, received, strict=True):
            rows = flat[:size].view(-1, *part.shape[1:])
            for held in slices_of_rows(boxes[name], rows):
                in_whole(whole, held.spec).copy_(held.tensor)
        return whole


def _shard_of(boxes: Boxes, shard: int, *, num_shards: int) -> Boxes:
    """The rows of a share that are one shard of it."""
    num_rows = sum(box.size[0] for box in boxes)
    length = -(-num_rows // num_shards)
    first, last = (min(length * edge, num_rows) for edge in (shard, shard + 1))
    rows = torch.empty((last - first, *boxes[0].size[1:]), dtype=boxes[0].dtype, device="meta")
    return tuple(held.spec for held in slices_of_rows(boxes, rows, first_row=first))
