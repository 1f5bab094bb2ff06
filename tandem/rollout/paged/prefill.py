# SPDX-License-Identifier: Apache-2.0
"""Attention of packed runs of tokens, which also writes their keys and values into pages.

The keys that precede a run are read from pages, once for all runs with the same prefix. Another run
of the same pass may have written them.

Shapes: S runs, T packed tokens, C tokens before them, H query heads, K key/value heads, E head
dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.models.operators import MakeAttention, upload
from tandem.pictures import total_shift
from tandem.rollout.packing import pack
from tandem.rollout.paged.cache import PageStore
from tandem.rollout.paged.scheduler import Run


class PrefillAttention:
    """The causal attention of runs to themselves and their prefixes, for all layers of one pass.

    Attributes:
        packed: the decoder's input.
    """

    def __init__(
        self, runs: Sequence[Run], store: PageStore, *, make_attention: MakeAttention
    ) -> None:
        device = store.layers[0].keys.device
        prefixes = {_prefix(run): 0 for run in runs if run.start > 0}
        num_prefixed = 0
        for prefix in prefixes:
            prefixes[prefix] = num_prefixed
            num_prefixed += prefix[1]
        self.packed = pack(
            [run.token_ids for run in runs],
            [run.start for run in runs],
            prefix_starts=[prefixes.get(_prefix(run), 0) for run in runs],
            device=device,
            pictures=[picture for run in runs if run.start == 0 for picture in run.pictures],
            shifts=[total_shift(run.pictures) if run.start > 0 else 0 for run in runs],
        )
        self._attention = make_attention(self.packed.segments, device)
        self._layers = store.layers
        stops = [run.start + len(run.token_ids) for run in runs]
        self._places_2T = upload(
            _places(
                [(run.pages, run.start, stop) for run, stop in zip(runs, stops, strict=True)],
                page_tokens=store.page_tokens,
            ),
            device,
        )
        self._prefix_2C = (
            upload(
                _places(
                    [(pages, 0, stop) for pages, stop in prefixes], page_tokens=store.page_tokens
                ),
                device,
            )
            if prefixes
            else None
        )

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Store keys and values, then attend."""
        cache = self._layers[layer]
        page_T, offset_T = self._places_2T
        cache.keys[page_T, :, offset_T] = k_TKE
        cache.values[page_T, :, offset_T] = v_TKE
        if self._prefix_2C is not None:
            page_C, offset_C = self._prefix_2C
            k_TKE = torch.cat((k_TKE, cache.keys[page_C, :, offset_C]))
            v_TKE = torch.cat((v_TKE, cache.values[page_C, :, offset_C]))
        return self._attention(layer, q_THE, k_TKE, v_TKE)


def _prefix(run: Run) -> tuple[tuple[int, ...], int]:
    return run.prefix_pages, run.start


def _places(stretches: Sequence[tuple[Sequence[int], int, int]], *, page_tokens: int) -> Tensor:
    """Return page and offset of positions start..stop-1 in each page list, int64 (2, tokens)."""
    page = [
        np.array(pages)[np.arange(start, stop) // page_tokens] for pages, start, stop in stretches
    ]
    offset = [np.arange(start, stop) % page_tokens for _, start, stop in stretches]
    return torch.from_numpy(np.stack((np.concatenate(page), np.concatenate(offset))))
