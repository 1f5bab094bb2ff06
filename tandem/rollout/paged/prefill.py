# SPDX-License-Identifier: Apache-2.0
"""Attention of packed prompts that also writes their keys and values into pages.

Shapes: P prompts, T packed tokens, H query heads, K key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.models.operators import MakeAttention
from tandem.rollout.paged.cache import PAGE_TOKENS, PageStore
from tandem.types import Segments


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """0..length-1 of each prompt, int64 (T,)."""
    return torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))


class PrefillAttention:
    """Causal attention within each prompt, for all layers of one pass.

    Attributes:
        last_P: index into T of each prompt's last token.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        pages: Sequence[Sequence[int]],
        *,
        store: PageStore,
        packed: MakeAttention,
    ) -> None:
        device = store.layers[0].keys.device
        length_P = torch.tensor(lengths)
        stop_P = length_P.cumsum(0)
        none_P = torch.zeros_like(length_P)
        segments = Segments(stop_P - length_P, length_P, none_P, none_P)
        self._attention = packed(segments, device)
        self._layers = store.layers
        position = packed_positions(lengths)
        page = np.concatenate(
            [
                np.repeat(np.array(own), PAGE_TOKENS)[:length]
                for own, length in zip(pages, lengths, strict=True)
            ]
        )
        self._page_T = torch.from_numpy(page).to(device)
        self._offset_T = (position % PAGE_TOKENS).to(device)
        self.last_P = (stop_P - 1).to(device)

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Store, then attend."""
        cache = self._layers[layer]
        cache.keys[self._page_T, :, self._offset_T] = k_TKE
        cache.values[self._page_T, :, self._offset_T] = v_TKE
        return self._attention(layer, q_THE, k_TKE, v_TKE)
