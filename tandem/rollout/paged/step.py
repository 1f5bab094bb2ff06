# SPDX-License-Identifier: Apache-2.0
"""A decode step of the paged engine: the decoder, attention over pages, the draw of a token.

The step works on fixed buffers in place. It is captured once per batch size of a list, and the host
launches it with one call. Unused rows are inactive: they compute, but store and draw nothing.

Shapes: R rows, B rows of a captured size, H query heads, K key/value heads, E head dimension, N
pages of a block table, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.expert_parallel import equal_rows
from tandem.models.quantized import QuantizedDecoder
from tandem.platforms.capture import Capturer, Replay
from tandem.rollout.paged.cache import (
    PAGE_TOKENS,
    PageDivision,
    PageStore,
    RowState,
    RowTables,
    Tiles,
    Window,
)
from tandem.rollout.paged.kernels.attention import decode_attention, divide_pages, num_programs
from tandem.rollout.paged.kernels.sampling import draw_next
from tandem.rollout.paged.kernels.tiles import tile_heads
from tandem.rollout.recording import recorder_of


def batch_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes to capture: powers of two, then steps of a sixteenth to an eighth."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        size = sizes[-1]
        sizes.append(size + max(8, 1 << max(0, size.bit_length() - 4)))
    return [size for size in sizes if size < max_rows] + [max_rows]


def rows_of_tile(decoder: Decoder, *, page_tokens: int) -> int:
    """Return the most rows for which a common page is read once."""
    config, itemsize = decoder.config, decoder.lm_head_weight.dtype.itemsize
    heads = tile_heads(config.head_dim, page_tokens=page_tokens, itemsize=itemsize)
    return heads // (config.num_heads // config.num_kv_heads)


@dataclass(frozen=True, slots=True)
class Variant:
    """A choice of the operations of a step.

    Attributes:
        num_rows: the number of rows, one of ``batch_sizes``.
        filtered: whether a row may have top-k or top-p.
        shared: whether pages that adjacent rows have in common are read once for several of them.
    """

    num_rows: int
    filtered: bool
    shared: bool = False


@dataclass(frozen=True, slots=True)
class _PageAttention:
    store: PageStore
    rows: RowTables

    def __call__(self, layer: int, q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor) -> Tensor:
        cache = self.store.layers[layer]
        return decode_attention(q_BHE, k_BKE, v_BKE=v_BKE, cache=cache, rows=self.rows)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The buffers of a step, and the step itself.

    A captured step refers only to these and not to its ``DecodeStep``. Without that reference
    cycle, both are freed at once.
    """

    decoder: Decoder
    compute: Decoder | QuantizedDecoder
    state: RowState
    window: Window
    row_R: Tensor

    def _compute(self, numbers: Tensor, position_B: Tensor, *, attention: _PageAttention) -> Tensor:
        """Return hidden states (B, D), and record the experts of the tokens, if they are asked for.

        They stand where the draw that follows writes its token.
        """
        token_B, routes_RWLX = numbers[:, RowState.TOKEN], self.window.routes_BWLX
        if routes_RWLX is None:
            return self.compute(token_B, position_B, attention)
        recorder = recorder_of(self.decoder.config.experts)
        assert recorder is not None, "only a model with experts has routes"
        h_BD = self.decoder(token_B, position_B, attention, routing=recorder)
        row_B = torch.arange(len(token_B), device=token_B.device)
        routes_RWLX[row_B, numbers[:, RowState.COUNT]] = recorder.routes()
        return h_BD

    def logits(self, h_BD: Tensor) -> Tensor:
        """Return logits (B, V), fp32."""
        return self.decoder.operators.logits(h_BD, self.decoder.lm_head_weight)

    def run(self, store: PageStore, rows: RowTables, *, filtered: bool) -> None:
        """Compute one token for each row."""
        size = len(rows.table_BN)
        divide_pages(rows)
        numbers = self.state.numbers[:size]
        position_B = rows.position_B
        if self.decoder.tower is not None:
            position_B = position_B + numbers[:, RowState.SHIFT]
        attention = _PageAttention(store, rows)
        with equal_rows(self.decoder):
            h_BD = self._compute(numbers, position_B, attention=attention)
        logits_BV = self.logits(h_BD)
        draw_next(
            logits_BV,
            self.state.rows(slice(size)),
            window=self.window.rows(slice(size)),
            filtered=filtered,
            logits_row_B=self.row_R[:size],
        )


class DecodeStep:
    """Captured steps over one set of buffers.

    Args:
        quantized: computes in place of ``decoder``, if given.
        page_tokens: tokens of a page.

    Attributes:
        state: the state of all rows.
        table_RN: the pages of all rows, int32.
        window: the inputs and outputs of steps.
    """

    def __init__(
        self,
        decoder: Decoder,
        capturer: Capturer,
        *,
        table_RN: Tensor,
        window: Window,
        num_multiprocessors: int,
        quantized: QuantizedDecoder | None = None,
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        max_rows = len(table_RN)
        device = decoder.lm_head_weight.device
        self._capture = capturer
        self._replays: dict[Variant, Replay] = {}
        self.state = RowState.allocate(max_rows, device)
        self.window = window
        self.table_RN = table_RN
        row_R = torch.arange(max_rows, dtype=torch.int32, device=device)
        compute = quantized or decoder
        self._buffers = _Buffers(decoder, compute, self.state, window, row_R)
        config = decoder.config
        programs = num_programs(
            config.head_dim,
            kv_heads=config.num_kv_heads,
            num_multiprocessors=num_multiprocessors,
        )
        self._division = PageDivision.allocate(
            max_rows,
            programs,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            device=device,
            page_tokens=page_tokens,
        )

    def is_captured(self, variant: Variant) -> bool:
        """Return whether a variant of the step has been captured."""
        return variant in self._replays

    def forget(self, variant: Variant) -> None:
        """Let the next use of the step capture it again."""
        self._replays.pop(variant, None)

    def prepare(self, num_rows: int, store: PageStore, *, variant: Variant) -> Replay:
        """Return a variant of the step. Rows behind the first ``num_rows`` become inactive."""
        self.state.numbers[num_rows : variant.num_rows] = 0
        replay = self._replays.get(variant)
        if replay is None:
            buffers, tables, filtered = self._buffers, self._tables(variant), variant.filtered
            numbers = self.state.numbers.clone()
            self.state.numbers.zero_()  # capturing may run the step, which must change nothing
            replay = self._capture(lambda: buffers.run(store, tables, filtered=filtered))
            self._replays[variant] = replay
            self.state.numbers.copy_(numbers)
        return replay

    def logits(self, h_BD: Tensor) -> Tensor:
        """Return logits (B, V), fp32."""
        return self._buffers.logits(h_BD)

    @cached_property
    def _tiles(self) -> Tiles:
        """The tiles of the steps that have any. Most engines never need them."""
        decoder, page_tokens = self._buffers.decoder, self._division.page_tokens
        return Tiles.allocate(
            len(self.table_RN),
            rows_of_tile=rows_of_tile(decoder, page_tokens=page_tokens),
            num_heads=decoder.config.num_heads,
            head_dim=decoder.config.head_dim,
            device=self.table_RN.device,
        )

    def _tables(self, variant: Variant) -> RowTables:
        size = variant.num_rows
        numbers = self.state.numbers[:size]
        return RowTables(
            self.table_RN[:size],
            numbers[:, RowState.POSITION],
            numbers[:, RowState.ACTIVE],
            numbers[:, RowState.SHARED],
            self._division.rows(slice(size)),
            self._tiles if variant.shared else None,
        )
