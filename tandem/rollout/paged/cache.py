# SPDX-License-Identifier: Apache-2.0
"""Device memory of the paged engine: pages of keys and values, and the state of running rows.

Everything is allocated once and changed in place, so that captured graphs stay valid. Which page
belongs to whom is ``pages.py``'s.

Shapes: R rows, L layers, P tokens of a page, N pages of a block table, K key/value heads, H query
heads, E head dimension, S programs of attention a key/value head, W tokens of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from tandem.models.operators import upload
from tandem.rollout.settings import CacheShape

PAGE_TOKENS = 64
HEAD_DIMS = (16, 32, 64, 128, 256)
"""Head dimensions that there are attention kernels for."""


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, (pages, K, P, E) each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class TailCopy:
    """The first ``num_tokens`` tokens of page ``source`` belong in page ``target``, too."""

    source: int
    target: int
    num_tokens: int


class PageStore:
    """The pages of all layers. ``layers[i]`` are layer i's."""

    def __init__(self, shape: CacheShape, num_pages: int) -> None:
        self.num_pages = num_pages
        size = (num_pages, shape.num_kv_heads, PAGE_TOKENS, shape.head_dim)
        # Zeros, because a masked product of a NaN is a NaN.
        self.layers = [
            LayerCache(
                torch.zeros(size, dtype=shape.dtype, device=shape.device),
                torch.zeros(size, dtype=shape.dtype, device=shape.device),
            )
            for _ in range(shape.num_layers)
        ]

    def copy_tails(self, copies: Sequence[TailCopy]) -> None:
        """Carry out ``copies`` in every layer."""
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
    """What the device knows of each row; ``numbers`` is int64 (R, 9), ``settings`` fp32 (R, 2).

    Fields of ``numbers``: the token to be fed next and its position, how many tokens may still be
    drawn, whether the row runs, how many tokens this window has drawn, whether an end token ends
    it, top-k, the key of its random stream, and how many numbers of that stream earlier windows
    used. Fields of ``settings``: temperature (0 is greedy) and top-p.
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
    NUM_FIELDS: ClassVar[int] = 9

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> RowState:
        """All rows inactive."""
        numbers = torch.zeros((num_rows, cls.NUM_FIELDS), dtype=torch.int64, device=device)
        return cls(numbers, torch.zeros((num_rows, 2), device=device))

    def rows(self, rows: slice) -> RowState:
        """Views of some rows."""
        return RowState(self.numbers[rows], self.settings[rows])


@dataclass(frozen=True, slots=True)
class Window:
    """What the steps between two looks of the host consume and produce, (R, W) each.

    ``eos_ids``: int64, tokens that end a response.
    """

    uniform_BW: Tensor
    token_BW: Tensor
    logp_BW: Tensor
    eos_ids: Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, num_tokens: int, *, eos_ids: tuple[int, ...], device: torch.device
    ) -> Window:
        """Zeros."""
        size = (num_rows, num_tokens)
        return cls(
            torch.zeros(size, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, device=device),
            torch.tensor(eos_ids, dtype=torch.int64, device=device),
        )

    def rows(self, rows: slice) -> Window:
        """Views of some rows."""
        return Window(self.uniform_BW[rows], self.token_BW[rows], self.logp_BW[rows], self.eos_ids)


@dataclass(frozen=True, slots=True)
class PageDivision:
    """The pages of all rows stand in one line, which the programs of a key/value head divide.

    Attributes:
        end_B: int32, where each row's pages end.
        begin_S: int32, where each program begins, and where the last one ends. Those that are not
            needed stand at the end of the line.
        row_S: int32, the row that each begins in.
        part_S2HE, stats_S2H2: fp32 room for what programs have of the rows they share: of the one
            that they begin inside of, and of the one that they end inside of.
    """

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
    ) -> PageDivision:
        """Room for it; ``kernels.attention.divide_pages`` fills it."""
        return cls(
            torch.empty(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_programs + 1, dtype=torch.int32, device=device),
            torch.empty(num_programs, dtype=torch.int32, device=device),
            torch.empty((num_programs, 2, num_heads, head_dim), device=device),
            torch.empty((num_programs, 2, num_heads, 2), device=device),
        )

    def rows(self, rows: slice) -> PageDivision:
        """The same room for some rows alone."""
        return replace(self, end_B=self.end_B[rows])


@dataclass(frozen=True, slots=True)
class RowTables:
    """What a decode step's attention knows of its B rows.

    Attributes:
        table_BN: int32, the pages of each row in order.
        position_B, active_B: int64 fields of ``RowState.numbers``.
        division: of these rows' pages among programs.
    """

    table_BN: Tensor
    position_B: Tensor
    active_B: Tensor
    division: PageDivision
