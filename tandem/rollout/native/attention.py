# SPDX-License-Identifier: Apache-2.0
"""The attention functions of the dense engine: prefill, which keeps keys and values, and decode.

Decode writes one key and value per row into the cache and attends to all columns of that row. The
query heads that share a key/value head are the rows of one matrix product, which avoids repeating
keys and values. It is plain torch for any device; the paged engine has kernels instead.

Shapes: B rows, C columns, T packed tokens, H query heads, K key/value heads, G = H / K, E head
dimension.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.models.attention import PackedAttention
from tandem.rollout.native.cache import RowCache, TokenStates
from tandem.rollout.packing import Packed


class PrefillAttention:
    """Attention over packed runs that keeps every layer's keys and values.

    Attributes:
        packed: the decoder's input.
    """

    def __init__(self, packed: Packed, prefix: TokenStates | None = None) -> None:
        """Prepare the attention of one pass.

        Args:
            prefix: the states that precede the runs. Without it all runs begin at position 0.
        """
        self.packed = packed
        self._attention = PackedAttention(packed.segments, packed.token_T.device)
        self._prefix = prefix
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Attend causally to each run and its prefix. Layers must come in order."""
        self._keys.append(k_TKE.permute(1, 2, 0).contiguous())
        self._values.append(v_TKE.transpose(0, 1).contiguous())
        if self._prefix is not None:
            k_TKE = torch.cat((k_TKE, self._prefix.keys[layer].permute(2, 0, 1)))
            v_TKE = torch.cat((v_TKE, self._prefix.values[layer].transpose(0, 1)))
        return self._attention(layer, q_THE, k_TKE, v_TKE)

    def states(self) -> TokenStates:
        """Return the keys and values of all layers."""
        return TokenStates(tuple(self._keys), tuple(self._values))


class DecodeAttention:
    """The attention of one new token per row, over columns ``first_column .. column`` of a cache.

    It is valid until rows enter, leave or move, or the cache is resized. The caller sets ``column``
    per step.
    """

    def __init__(self, cache: RowCache, num_rows: int, *, first_column: int, masked: bool) -> None:
        self.column = first_column
        self._offset = cache.first_column
        self._start = first_column - cache.first_column
        self._keys = [key[:num_rows] for key in cache.keys]
        self._values = [value[:num_rows] for value in cache.values]
        # One batched product covers the heads of all rows.
        self._key_heads = [key.flatten(0, 1) for key in self._keys]
        self._value_heads = [value.flatten(0, 1) for value in self._values]
        self._scale = cache.keys[0].shape[2] ** -0.5
        self._masked = masked
        self._bias = self._make_bias(cache, num_rows) if masked else cache.keys[0].new_zeros(())

    def __call__(self, layer: int, q_BHE: Tensor, k_BKE: Tensor, v_BKE: Tensor) -> Tensor:
        """Store the new key and value, then attend."""
        now = self.column - self._offset
        self._keys[layer].select(3, now).copy_(k_BKE)
        self._values[layer].select(2, now).copy_(v_BKE)
        num_visible = now + 1 - self._start
        keys = self._key_heads[layer].narrow(2, self._start, num_visible)
        values = self._value_heads[layer].narrow(1, self._start, num_visible)
        bias = self._bias.narrow(2, self._start, num_visible) if self._masked else self._bias
        queries = q_BHE.reshape(keys.shape[0], -1, keys.shape[1])
        scores = torch.baddbmm(bias, queries, keys, beta=int(self._masked), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values).view(q_BHE.shape)

    def _make_bias(self, cache: RowCache, num_rows: int) -> Tensor:
        """Return (B * K, 1, C), -inf in the columns before a row's first token."""
        columns_C = torch.arange(
            cache.first_column, cache.stop_column, device=cache.facts_4R.device
        )
        hidden_BC = columns_C < cache.facts_4R[0, :num_rows, None]
        bias_BC = torch.zeros(hidden_BC.shape, dtype=cache.keys[0].dtype, device=hidden_BC.device)
        bias_BC.masked_fill_(hidden_BC, float("-inf"))
        return bias_BC.repeat_interleave(cache.shape.num_kv_heads, 0)[:, None]
