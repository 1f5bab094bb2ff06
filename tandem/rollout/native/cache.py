# SPDX-License-Identifier: Apache-2.0
"""The storage of running sequences by (row, column): keys, values, tokens, log-probs, uniforms.

Columns are absolute and grow without bound. The cache holds a window of them, which it shifts or
enlarges on demand, so memory follows the longest running sequence and not the longest permitted
one. Closing a gap copies only the rows that fill it. The cache is dense and not paged, because a
gather on a CPU costs as much as it would save.

Shapes: R rows allocated, C columns allocated, T packed prompt tokens, K key/value heads, E head
dimension, J random numbers, L layers with experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.rollout.settings import CacheShape

NUM_UNIFORMS = 32
"""Random numbers computed ahead for each row."""


@dataclass(frozen=True, slots=True)
class TokenStates:
    """Keys (K, E, T) and values (K, T, E) of packed tokens, per layer, and recorded routes."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    routes_TLX: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens."""
        return self.values[0].shape[1]

    @classmethod
    def join(cls, parts: Sequence[TokenStates]) -> TokenStates:
        """Return the states of all parts, one behind the other."""
        keys = zip(*(part.keys for part in parts), strict=True)
        values = zip(*(part.values for part in parts), strict=True)
        return cls(
            tuple(torch.cat(layer, 2) for layer in keys),
            tuple(torch.cat(layer, 1) for layer in values),
        )

    def part(self, tokens: slice) -> TokenStates:
        """Copy the states of ``tokens``; the memory of the others can then be freed."""
        keys = tuple(key[..., tokens].clone() for key in self.keys)
        values = tuple(value[:, tokens].clone() for value in self.values)
        routes_TLX = None if self.routes_TLX is None else self.routes_TLX[tokens].clone()
        return TokenStates(keys, values, routes_TLX)


class RowCache:
    """Buffers that grow, shift and compact together.

    Attributes:
        shape: the shape of one token's keys and values.
        first_column: the column at index 0.
        keys: (R, K, E, C) for each layer, transposed, because the product with a query is faster.
        values: (R, K, C, E) for each layer.
        tokens_RC: int64, the generated tokens.
        logp_RC: fp32, their log-probs.
        routes_RCLX: the experts of each token; L and X are 0 if they are not recorded.
        facts_4R: int64, for each row its start column, first generated column, random stream's key,
            and the shift of its positions by pictures.
        uniform_RJ: fp32, the next numbers of that stream.
    """

    def __init__(self, shape: CacheShape, routes_LX: Tensor | None = None) -> None:
        """Create an empty cache; ``routes_LX`` has the shape and type of a token's routes."""
        self.shape = shape
        nothing = torch.empty((0, 0), dtype=torch.uint8, device=shape.device)
        self._routes_LX = nothing if routes_LX is None else routes_LX
        self.release()

    def release(self) -> None:
        """Free all memory."""
        shape, heads, width = self.shape, self.shape.num_kv_heads, self.shape.head_dim
        empty = torch.empty(0, device=shape.device)
        self.first_column = 0
        self.keys = [
            empty.new_empty((0, heads, width, 0), dtype=shape.dtype)
            for _ in range(shape.num_layers)
        ]
        self.values = [key.transpose(2, 3) for key in self.keys]
        self.tokens_RC = empty.new_empty((0, 0), dtype=torch.int64)
        self.logp_RC = empty.new_empty((0, 0))
        self.routes_RCLX = self._routes_LX.new_empty((0, 0, *self._routes_LX.shape))
        self.facts_4R = empty.new_empty((4, 0), dtype=torch.int64)
        self.uniform_RJ = empty.new_empty((0, NUM_UNIFORMS))

    @property
    def num_bytes(self) -> int:
        """The memory of keys and values."""
        return sum(buffer.nbytes for buffer in (*self.keys, *self.values))

    @property
    def stop_column(self) -> int:
        """The end of the window: one past its last column."""
        return self.first_column + self.tokens_RC.shape[1]

    def index(self, columns: range) -> slice:
        """Return the indices of ``columns`` in the buffers."""
        return slice(columns.start - self.first_column, columns.stop - self.first_column)

    def has_room(self, num_rows: int, columns: range) -> bool:
        """Return whether rows 0..``num_rows``-1 have room for ``columns``."""
        has_columns = self.first_column <= columns.start and columns.stop <= self.stop_column
        return num_rows <= len(self.tokens_RC) and has_columns

    def reserve(self, num_rows: int, columns: range, *, live_rows: int) -> None:
        """Make room for rows 0..``num_rows``-1 and for ``columns``.

        Rows 0..``live_rows``-1 keep their contents in ``columns``. The rest may be lost.
        """
        start = max(columns.start, self.first_column)
        kept = range(start, min(columns.stop, self.stop_column))
        if live_rows == 0:
            self.first_column, kept = columns.start, range(columns.start, columns.start)
        size = (max(num_rows, len(self.tokens_RC)), max(len(columns), self.tokens_RC.shape[1]))
        source = self.index(kept)
        self.first_column = columns.start
        block = _Block(size, live_rows, source=source, target=self.index(kept))
        for layer in range(self.shape.num_layers):
            self.keys[layer] = block.regrid(self.keys[layer], 3)
            self.values[layer] = block.regrid(self.values[layer], 2)
        self.tokens_RC = block.regrid(self.tokens_RC, 1)
        self.logp_RC = block.regrid(self.logp_RC, 1)
        self.routes_RCLX = block.regrid(self.routes_RCLX, 1)
        new_rows = size[0] - len(self.uniform_RJ)
        self.facts_4R = F.pad(self.facts_4R, (0, new_rows))
        self.uniform_RJ = F.pad(self.uniform_RJ, (0, 0, 0, new_rows))

    def write(self, rows: slice, states: TokenStates, *, tokens: slice, column: int) -> None:
        """Write the states of ``tokens`` into each of ``rows``, ending before ``column``."""
        stop = column - self.first_column
        columns = slice(stop - (tokens.stop - tokens.start), stop)
        for layer in range(self.shape.num_layers):
            self.keys[layer][rows, :, :, columns] = states.keys[layer][..., tokens]
            self.values[layer][rows, :, columns] = states.values[layer][:, tokens]
        if states.routes_TLX is not None:
            self.routes_RCLX[rows, columns] = states.routes_TLX[tokens]

    def read(self, places: Sequence[tuple[int, range]]) -> TokenStates:
        """Return the states of some columns of some rows, concatenated."""
        where = [(row, self.index(columns)) for row, columns in places]
        keys = [torch.cat([key[row, :, :, at] for row, at in where], 2) for key in self.keys]
        values = [torch.cat([value[row, :, at] for row, at in where], 1) for value in self.values]
        return TokenStates(tuple(keys), tuple(values))

    def routes_of(self, rows: Sequence[int], spans: Sequence[range]) -> list[np.ndarray]:
        """Copy the routes of a span of columns of each row to the host."""
        window = self.index(range(min(span.start for span in spans), spans[0].stop))
        index = torch.tensor(rows, device=self.shape.device)
        routes = self.routes_RCLX[:, window].index_select(0, index).cpu().numpy()
        first = window.start + self.first_column
        return [own[span.start - first :] for own, span in zip(routes, spans, strict=True)]

    def move_rows(self, sources: Sequence[int], targets: Sequence[int], *, columns: range) -> None:
        """Copy rows ``sources`` over rows ``targets`` within ``columns``."""
        if not sources:
            return
        source, target = torch.tensor((sources, targets), device=self.shape.device)
        where = self.index(columns)
        windows = [key[..., where] for key in self.keys]
        windows += [value[:, :, where] for value in self.values]
        windows += [buffer[:, where] for buffer in (self.tokens_RC, self.logp_RC)]
        windows += [self.routes_RCLX[:, where]] if self.routes_RCLX.numel() else []
        for window in (*windows, self.facts_4R.T, self.uniform_RJ):
            window.index_copy_(0, target, window.index_select(0, source))


@dataclass(frozen=True, slots=True)
class _Block:
    """The block that ``reserve`` keeps: the first ``rows`` rows of column indices ``source`` in the
    old buffer, which move to ``target`` in the new one.
    """

    size: tuple[int, int]
    rows: int
    source: slice
    target: slice

    def regrid(self, buffer: Tensor, column_dim: int) -> Tensor:
        """Shift the columns of ``buffer``, in place if it is large enough, and return it."""
        kept = _columns(buffer[: self.rows], column_dim, where=self.source)
        if (buffer.shape[0], buffer.shape[column_dim]) == self.size:
            kept = kept.clone()
        else:
            shape = list(buffer.shape)
            shape[0], shape[column_dim] = self.size
            buffer = buffer.new_zeros(shape)
        _columns(buffer[: self.rows], column_dim, where=self.target).copy_(kept)
        return buffer


def _columns(buffer: Tensor, column_dim: int, *, where: slice) -> Tensor:
    return buffer.narrow(column_dim, where.start, where.stop - where.start)
