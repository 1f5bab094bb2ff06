# SPDX-License-Identifier: Apache-2.0
"""One decode step of the paged engine: the decoder, attention over pages, the draw of a token.

The step works on fixed buffers in place and is captured once for each of a list of batch sizes, so
that the host's part of a step is one launch. Rows beyond those in use are inactive: they compute,
store nothing and draw nothing.

Shapes: R rows, B rows of a captured size, H query heads, K key/value heads, E head dimension, N
pages of a block table, S shares, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.platforms.capture import Capturer, Replay
from tandem.rollout.paged.cache import PageStore, RowState, RowTables, Window
from tandem.rollout.paged.kernels.attention import decode_attention
from tandem.rollout.paged.kernels.sampling import draw_next

_MAX_SHARES = 16
_LONG_SHARE_PAGES = 16
"""Where there are rows enough to keep the device busy, but for a longer one at the end."""
_MANY_ROUNDS = 8
"""Of as many programs as keep it busy: a long row, which is an old one and stands at the front, has
ended before the last."""


def batch_sizes(max_rows: int) -> list[int]:
    """Sizes a step is captured for: powers of two, then steps of a sixteenth to an eighth."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        size = sizes[-1]
        sizes.append(size + max(8, 1 << max(0, size.bit_length() - 4)))
    return [size for size in sizes if size < max_rows] + [max_rows]


def shares_of_rows(num_programs: int, *, pages: int, busy_programs: int) -> tuple[int, int]:
    """Into how many parts a row of up to ``pages`` pages is divided at most, and from how many
    pages on.

    Args:
        num_programs: of attention, if no row is divided.
        busy_programs: how many keep the device busy.
    """
    even = max(1, busy_programs // num_programs)
    longest = min(-(-pages // _LONG_SHARE_PAGES), _MANY_ROUNDS * busy_programs // num_programs)
    return min(_MAX_SHARES, max(even, longest)), 1 if even > 1 else _LONG_SHARE_PAGES


def _num_rows_divided(size: int, shares: int) -> int:
    return size if shares > 1 else 0


@dataclass(frozen=True, slots=True)
class _PageAttention:
    """The decoder's attention over the pages of its rows."""

    store: PageStore
    rows: RowTables

    def __call__(self, layer: int, q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor) -> Tensor:
        cache = self.store.layers[layer]
        return decode_attention(q_BHE, k_BKE, v_BKE=v_BKE, cache=cache, rows=self.rows)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """What a step works on, and the step itself: what is captured refers to this alone, so that it
    goes with the ``DecodeStep`` at once and not when Python next looks for cycles."""

    decoder: Decoder
    state: RowState
    window: Window
    row_R: Tensor

    def logits(self, h_BD: Tensor) -> Tensor:
        """(B, V), fp32."""
        return self.decoder.operators.logits(h_BD, self.decoder.lm_head_weight)

    def run(self, store: PageStore, rows: RowTables, *, filtered: bool) -> None:
        """One token for each row."""
        size = len(rows.table_BN)
        token_B = self.state.numbers[:size, RowState.TOKEN]
        logits_BV = self.logits(self.decoder(token_B, rows.position_B, _PageAttention(store, rows)))
        draw_next(
            logits_BV,
            self.state.rows(slice(size)),
            window=self.window.rows(slice(size)),
            filtered=filtered,
            logits_row_B=self.row_R[:size],
        )


class DecodeStep:
    """Captured steps over one set of buffers.

    Attributes:
        state, table_RN: of all rows; pages are int32.
        window: what steps consume and produce.
    """

    def __init__(
        self,
        decoder: Decoder,
        capturer: Capturer,
        *,
        table_RN: Tensor,
        window: Window,
        busy_programs: int,
    ) -> None:
        """``busy_programs``: how many attention programs keep the device busy."""
        max_rows = len(table_RN)
        device = decoder.lm_head_weight.device
        self._capture = capturer
        self._sizes = batch_sizes(max_rows)
        self._replays: dict[tuple[int, bool], Replay] = {}
        self.state = RowState.allocate(max_rows, device)
        self.window = window
        self.table_RN = table_RN
        row_R = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._buffers = _Buffers(decoder, self.state, window, row_R)
        config, pages = decoder.config, table_RN.shape[1]
        self._shares = {
            size: shares_of_rows(
                size * config.num_kv_heads, pages=pages, busy_programs=busy_programs
            )
            for size in self._sizes
        }
        # One room for all sizes, of which one is in use at a time.
        rows = max(_num_rows_divided(size, n) * n for size, (n, _) in self._shares.items())
        num_cells = config.num_heads * rows
        self._room = torch.empty(num_cells * (config.head_dim + 2), device=device)

    def prepare(self, num_rows: int, store: PageStore, *, filtered: bool) -> Replay:
        """The step for at least ``num_rows`` rows; those beyond become inactive."""
        size = next(size for size in self._sizes if size >= num_rows)
        self.state.numbers[num_rows:size] = 0
        replay = self._replays.get((size, filtered))
        if replay is None:
            buffers, tables = self._buffers, self._tables(size)
            numbers = self.state.numbers.clone()
            self.state.numbers.zero_()  # what is captured may run, and must change nothing
            replay = self._capture(lambda: buffers.run(store, tables, filtered=filtered))
            self._replays[size, filtered] = replay
            self.state.numbers.copy_(numbers)
        return replay

    def logits(self, h_BD: Tensor) -> Tensor:
        """(B, V), fp32."""
        return self._buffers.logits(h_BD)

    def _tables(self, size: int) -> RowTables:
        config, numbers = self._buffers.decoder.config, self.state.numbers[:size]
        shares, share_pages = self._shares[size]
        cells = (_num_rows_divided(size, shares), config.num_heads, shares)
        num_partial = math.prod(cells) * config.head_dim
        return RowTables(
            self.table_RN[:size],
            numbers[:, RowState.POSITION],
            numbers[:, RowState.ACTIVE],
            shares,
            share_pages,
            self._room[:num_partial].view(*cells, config.head_dim),
            self._room[num_partial : num_partial + 2 * math.prod(cells)].view(*cells, 2),
        )
