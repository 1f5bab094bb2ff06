# SPDX-License-Identifier: Apache-2.0
"""The pictures of packed tokens: which tokens they are, and positions with three axes.

Positions are Qwen's: text has the same position on all axes. A token of a picture has the position
at which the picture begins, to which its row and its column are added on the second and third axis.
Text goes on behind the largest position. All of it is computed on the host, from tokens alone.

Shapes: T packed tokens, U tokens of pictures, S segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.models.decoder import View
from tandem.models.operators import upload
from tandem.pictures import Picture
from tandem.types import Segments


@dataclass(frozen=True, slots=True)
class Sight:
    """The pictures of a packed batch as the decoder reads them, on the CPU.

    Attributes:
        token_ids_T: the tokens, with 0 in place of those of pictures.
        position_T3: positions in time, rows and columns.
        place_U: the indices into T of the tokens of pictures.
        row_U: the row of the tower's output that each of them reads.
        pictures: the pictures whose tokens the tower's output has, one after the other.
    """

    token_ids_T: Tensor
    position_T3: Tensor
    place_U: Tensor
    row_U: Tensor
    pictures: tuple[Picture, ...]


def see(
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    *,
    segments: Segments,
    pictures: Sequence[Picture],
    prefix_shift_S: Sequence[int] | None = None,
) -> Sight:
    """Find the pictures among packed tokens.

    Args:
        position_ids_T: the index of each token in its own sequence.
        pictures: all pictures whose tokens occur, at least one.
        prefix_shift_S: the sum of the shifts in the prefix of each segment; None: prefixes are
            segments of the batch.
    """
    token_T = token_ids_T.numpy()
    table = sorted({picture.first_id: picture for picture in pictures}.items())
    first_P = np.array([first for first, _ in table])
    rows_P, columns_P = (
        np.array([getattr(picture, name) for _, picture in table]) for name in ("rows", "columns")
    )
    count_P = rows_P * columns_P
    place_U = np.flatnonzero(token_T >= first_P[0])
    picture_U = np.searchsorted(first_P, token_T[place_U], side="right") - 1
    inside_U = token_T[place_U] - first_P[picture_U]
    assert (inside_U < count_P[picture_U]).all(), "a token of a picture that the batch lacks"

    shift_T = np.zeros(len(token_T) + 1, dtype=np.int64)  # applies behind the last token
    ends = inside_U == count_P[picture_U] - 1
    shift_T[place_U[ends] + 1] = (np.maximum(rows_P, columns_P) - count_P)[picture_U[ends]]
    position_T = position_ids_T.numpy() + _within_sequences(
        shift_T, segments, prefix_shift_S=prefix_shift_S
    )
    position_T3 = np.repeat(position_T[:, None], 3, axis=1)
    row_U, column_U = np.divmod(inside_U, columns_P[picture_U])
    start_U = position_T[place_U] - inside_U
    position_T3[place_U] = np.stack([start_U, start_U + row_U, start_U + column_U], axis=1)
    feature_P = np.cumsum(count_P) - count_P
    return Sight(
        token_ids_T=torch.from_numpy(np.where(token_T >= first_P[0], 0, token_T)),
        position_T3=torch.from_numpy(position_T3),
        place_U=torch.from_numpy(place_U),
        row_U=torch.from_numpy(feature_P[picture_U] + inside_U),
        pictures=tuple(picture for _, picture in table),
    )


def own_sight(sight: Sight, own: range) -> Sight:
    """Return the pictures among some tokens, with places from the first of them on.

    Only pictures that these tokens show are left, possibly none.
    """
    is_own_U = (sight.place_U >= own.start) & (sight.place_U < own.stop)
    row_U, stop_P = sight.row_U[is_own_U], np.cumsum([x.num_tokens for x in sight.pictures])
    index_U = np.searchsorted(stop_P, row_U.numpy(), side="right")
    shown_P, position_U = np.unique(index_U, return_inverse=True)
    pictures = tuple(sight.pictures[index] for index in shown_P)
    stop_own_P = np.cumsum([picture.num_tokens for picture in pictures], dtype=np.int64)
    moved_P = stop_own_P - stop_P[shown_P]
    return Sight(
        token_ids_T=sight.token_ids_T[own.start : own.stop],
        position_T3=sight.position_T3[own.start : own.stop],
        place_U=sight.place_U[is_own_U] - own.start,
        row_U=row_U + torch.from_numpy(moved_P[position_U]),
        pictures=pictures,
    )


def view_of(sight: Sight, device: torch.device) -> View:
    """Return the view of the pictures on a device."""
    place_U, row_U = (upload(x, device) for x in (sight.place_U, sight.row_U))
    return View(place_U, row_U, sight.pictures)


def _within_sequences(
    shift_T: np.ndarray, segments: Segments, *, prefix_shift_S: Sequence[int] | None
) -> np.ndarray:
    """Return the sum of the shifts before each token in its own sequence, (T,).

    Args:
        shift_T: the shift that applies from each token on, (T + 1,).
    """
    start_S, length_S = segments.start_S.numpy(), segments.length_S.numpy()
    # A shift at the first token of a segment belongs to the end of the segment before it.
    total_T = np.cumsum(shift_T)
    before_S = total_T[start_S]
    own_S = total_T[start_S + length_S] - before_S
    prefix_S = np.zeros(len(start_S), dtype=np.int64)
    if prefix_shift_S is not None:
        prefix_S[:] = prefix_shift_S
    else:
        has_prefix_S = segments.prefix_length_S.numpy() > 0
        index_S = np.searchsorted(start_S, segments.prefix_start_S.numpy()[has_prefix_S])
        prefix_S[has_prefix_S] = own_S[index_S]
    return total_T[:-1] + np.repeat(prefix_S - before_S, length_S)
