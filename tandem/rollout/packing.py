# SPDX-License-Identifier: Apache-2.0
"""Runs of tokens, packed without padding into one prefill pass.

A run begins at some position of its sequence. The keys of its prefix, for example a prompt, already
exist. They follow the keys of the pass, once for all runs with that prefix.

Shapes: S runs, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.models.decoder import View
from tandem.models.operators import upload
from tandem.models.sight import see, view_of
from tandem.pictures import Picture
from tandem.types import Segments


@dataclass(frozen=True, slots=True)
class Packed:
    """The input of a pass, int64. ``last_S`` is the index into T of each run's last token.

    Positions are (T, 3) if ``view`` has pictures.
    """

    token_T: Tensor
    position_T: Tensor
    last_S: Tensor
    segments: Segments
    view: View | None = None


def pack(
    runs: Sequence[Sequence[int]],
    starts: Sequence[int],
    *,
    prefix_starts: Sequence[int],
    device: torch.device,
    pictures: Sequence[Picture] = (),
    shifts: Sequence[int] | None = None,
) -> Packed:
    """Pack ``runs``, which begin at indices ``starts`` of their sequences.

    Args:
        prefix_starts: the index of each run's prefix (positions 0..start-1) among the existing
            keys; ignored for a run that begins at 0.
        pictures: the pictures whose tokens are in runs; such runs begin at 0.
        shifts: how much the pictures before each run shift its positions; None: by nothing.
    """
    length_S, start_S = torch.tensor([len(run) for run in runs]), torch.tensor(starts)
    stop_S = length_S.cumsum(0)
    first_S = stop_S - length_S
    prefix_start_S = torch.tensor(prefix_starts) + stop_S[-1]
    token_T = torch.from_numpy(np.concatenate([np.array(run, dtype=np.int64) for run in runs]))
    position_T = torch.arange(len(token_T)) + (start_S - first_S).repeat_interleave(length_S)
    segments = Segments(first_S, length_S, prefix_start_S, start_S)
    view = None
    if shifts is None:
        shifts = [0] * len(runs)
    if not pictures:
        position_T += torch.tensor(shifts).repeat_interleave(length_S)
    else:
        sight = see(
            token_T, position_T, segments=segments, pictures=pictures, prefix_shift_S=shifts
        )
        token_T, position_T, view = sight.token_ids_T, sight.position_T3, view_of(sight, device)
    last_S = upload(stop_S - 1, device)
    return Packed(upload(token_T, device), upload(position_T, device), last_S, segments, view)


def cost_of(num_tokens: int, start: int) -> int:
    """Return the cost of a run in tokens of a pass.

    The keys of its prefix are copied for the pass, which takes memory even if the run is short.
    """
    return max(num_tokens, (start + num_tokens) // 4)


def in_passes(costs: Sequence[int], max_cost: int) -> list[slice]:
    """Cut items into slices of at most ``max_cost``. A costlier item gets its own slice."""
    starts, total = [0], 0
    for index, cost in enumerate(costs):
        if index > starts[-1] and total + cost > max_cost:
            starts.append(index)
            total = 0
        total += cost
    stops = [*starts[1:], len(costs)]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
