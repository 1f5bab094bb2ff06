# SPDX-License-Identifier: Apache-2.0
"""The device memory of the paged engine: pages of keys and values, and the state of running rows.

Everything is allocated once and changed in place, because captured graphs refer to it. ``pages.py``
decides who owns which page.

Shapes: R rows, L layers, P tokens of a page, N pages of a block table, K key/value heads, H query
heads, E head dimension, S programs of attention per key/value head, W tokens of a window. Of
routes, L layers with experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tandem.config.derived.sizes import CACHE_PAGE_TOKENS
from tandem.models.operators import upload
from tandem.rollout.settings import CacheShape

PAGE_TOKENS = CACHE_PAGE_TOKENS
HEAD_DIMS = (16, 32, 64, 128, 256)
"""The head dimensions that have attention kernels."""
_SPLIT_ROWS = 1024
"""The least number of partial results, one for each row and split, that ``Tiles`` have room for."""
_MOST_SPLITS = 8


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, (pages, K, P, E) each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class TailCopy:
    """A copy of the first ``num_tokens`` tokens of page ``source`` to page ``target``."""

    source: int
    target: int
    num_tokens: int


class PageStore:
    """The pages of all layers.

    Attributes:
        layers: the pages of each layer.
    """

    def __init__(
        self, shape: CacheShape, num_pages: int, *, page_tokens: int = PAGE_TOKENS
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        size = (num_pages, shape.num_kv_heads, page_tokens, shape.head_dim)
        # Zeros, because a mask does not remove a NaN from a product.
        self.layers = [
            LayerCache(
                torch.zeros(size, dtype=shape.dtype, device=shape.device),
                torch.zeros(size, dtype=shape.dtype, device=shape.device),
            )
            for _ in range(shape.num_layers)
        ]

    def copy_tails(self, copies: Sequence[TailCopy]) -> None:
        """Copy parts of pages in every layer."""
        if not copies:
            return
        pages = torch.tensor([(copy.source, copy.target) for copy in copies])
        counts = [copy.num_tokens for copy in copies]
        page_Y2 = pages.repeat_interleave(torch.tensor(counts), 0)
        offset_Y = torch.cat([torch.arange(count) for count in counts])
        places_3Y = torch.stack((*page_Y2.unbind(1), offset_Y))
        source_Y, target_Y, offset_Y = upload(places_3Y, self.layers[0].keys.device)
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[target_Y, :, offset_Y] = states[source_Y, :, offset_Y]


@dataclass(frozen=True, slots=True)
class RowState:
    """The device's state of each row: ``numbers`` is int64 (R, 11), ``settings`` fp32 (R, 2).

    Fields of ``numbers``: the token to be fed next and its index in the sequence, how many tokens
    may still be drawn, whether the row runs, how many tokens this window has drawn, whether an end
    token ends it, top-k, the key of its random stream, how many numbers of that stream earlier
    windows used, what the pictures of the prompt add to an index to make a position (0 without
    pictures), and how many pages it may share with the other samples of its prompt. Fields of
    ``settings``: temperature (0 is greedy) and top-p.
    """

    numbers: Tensor
    settings: Tensor

    TOKEN: ClassVar[int] = 0
    POSITION: ClassVar[int] = 1
    REMAINING: ClassVar[int] = 2
    ACTIVE: ClassVar[int] = 3
    COUNT: ClassVar[int] = 4
    IGNORE_EOS: ClassVar[int] = 5
    TOP_K: ClassVar[int] = 6
    STREAM_KEY: ClassVar[int] = 7
    NUM_DRAWN: ClassVar[int] = 8
    SHIFT: ClassVar[int] = 9
    SHARED: ClassVar[int] = 10
    NUM_FIELDS: ClassVar[int] = 11

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> RowState:
        """Allocate rows that are all inactive."""
        numbers = torch.zeros((num_rows, cls.NUM_FIELDS), dtype=torch.int64, device=device)
        return cls(numbers, torch.zeros((num_rows, 2), device=device))

    def rows(self, rows: slice) -> RowState:
        """Return views of some rows."""
        return RowState(self.numbers[rows], self.settings[rows])


@dataclass(frozen=True, slots=True)
class Window:
    """The inputs and outputs of the steps between two reads by the host, (R, W) each.

    ``eos_ids`` (int64) are the tokens that end a response. ``routes_BWLX`` has the experts of the
    token that was fed before each draw of a step; it is None if they are not recorded.
    """

    uniform_BW: Tensor
    token_BW: Tensor
    logp_BW: Tensor
    eos_ids: Tensor
    routes_BWLX: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        num_tokens: int,
        *,
        eos_ids: tuple[int, ...],
        device: torch.device,
        routes_LX: Tensor | None = None,
    ) -> Window:
        """Allocate zeros. ``routes_LX`` has the shape and type of a token's routes."""
        size = (num_rows, num_tokens)
        return cls(
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, device=device),
            torch.tensor(eos_ids, dtype=torch.int64, device=device),
            None if routes_LX is None else routes_LX.new_zeros((*size, *routes_LX.shape)),
        )

    def rows(self, rows: slice) -> Window:
        """Return views of some rows."""
        routes_BWLX = None if self.routes_BWLX is None else self.routes_BWLX[rows]
        return Window(
            self.uniform_BW[rows],
            self.token_BW[rows],
            self.logp_BW[rows],
            self.eos_ids,
            routes_BWLX,
        )


@dataclass(frozen=True, slots=True)
class PageDivision:
    """The pages of all rows, in one list, divided among the programs of a key/value head.

    Attributes:
        page_tokens: tokens of a page.
        end_B: int32, the end of each row's pages in the list.
        begin_S: int32, the start of each program in the list, and the end of the last one. Unused
            programs start at the end of the list.
        row_S: int32, the row in which each program starts.
        part_S2HE, stats_S2H2: fp32 partial results of the row inside which a program starts and of
            the row inside which it ends, where several programs share a row.
    """

    page_tokens: int
    end_B: Tensor
    begin_S: Tensor
    row_S: Tensor
    part_S2HE: Tensor
    stats_S2H2: Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        num_programs: int,
        *,
        num_heads: int,
        head_dim: int,
        device: torch.device,
        page_tokens: int = PAGE_TOKENS,
    ) -> PageDivision:
        """Allocate a division, which ``kernels.attention.divide_pages`` fills."""
        return cls(
            page_tokens,
            torch.empty(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_programs + 1, dtype=torch.int32, device=device),
            torch.empty(num_programs, dtype=torch.int32, device=device),
            torch.empty((num_programs, 2, num_heads, head_dim), device=device),
            torch.empty((num_programs, 2, num_heads, 2), device=device),
        )

    def rows(self, rows: slice) -> PageDivision:
        """Return the same buffers for some of the rows."""
        return replace(self, end_B=self.end_B[rows])


@dataclass(frozen=True, slots=True)
class Tiles:
    """Adjacent rows that have pages in common, which are read once for each tile of rows.

    Attributes:
        num_rows: the most rows of a tile.
        num_pages_B: int32, the number of leading pages of each row that its tile reads; 0 without a
            tile.
        tile_B: int32, the tile of each row, -1 for a row without one.
        row_B: int32, the first row of each tile.
        counts_2: int32, the number of tiles, and into how many parts the pages of each are split.
        part_QHE, stats_QH2: fp32 partial results of each part and row, one part after the other.
    """

    num_rows: int
    num_pages_B: Tensor
    tile_B: Tensor
    row_B: Tensor
    counts_2: Tensor
    part_QHE: Tensor
    stats_QH2: Tensor

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        *,
        rows_of_tile: int,
        num_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> Tiles:
        """Allocate tiles for ``num_rows`` rows, which ``kernels.tiles.make_tiles`` fills."""
        num_parts = max(_SPLIT_ROWS, num_rows)

        def integers(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        return cls(
            rows_of_tile,
            num_pages_B=integers(num_rows),
            tile_B=integers(num_rows),
            row_B=integers(num_rows),
            counts_2=integers(2),
            part_QHE=torch.empty((num_parts, num_heads, head_dim), device=device),
            stats_QH2=torch.empty((num_parts, num_heads, 2), device=device),
        )

    def most_splits(self, num_rows: int) -> int:
        """Return into how many parts the pages of a tile may be split, for ``num_rows`` rows."""
        return max(1, min(_MOST_SPLITS, len(self.part_QHE) // num_rows))


@dataclass(frozen=True, slots=True)
class RowTables:
    """The inputs of a decode step's attention that describe its B rows.

    Attributes:
        table_BN: int32, the pages of each row in order.
        position_B, active_B, shared_B: int64 fields of ``RowState.numbers``.
        division: the division of these rows' pages among programs.
        tiles: the tiles of rows that read common pages once; None if each row reads all its pages.
    """

    table_BN: Tensor
    position_B: Tensor
    active_B: Tensor
    shared_B: Tensor
    division: PageDivision
    tiles: Tiles | None = None
