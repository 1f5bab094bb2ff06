# SPDX-License-Identifier: Apache-2.0
"""Pictures of prompts, at the size that the model reads.

A picture stands in its prompt as consecutive *virtual* tokens: ids from ``first_id`` on, which no
vocabulary has and no policy can draw. No two pictures of a run share an id, so that the tokens of a
prompt say which pictures it has. Equal prompts are then the same prompt, as without pictures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture whose sides are multiples of the side of a token.

    Attributes:
        first_id: the id of its first token; the others count on, row by row.
        rows, columns: its size in tokens.
        side: the side of a token in pixels.
        pixels: red, green and blue of each pixel, uint8, (rows x side, columns x side, 3).
    """

    first_id: int
    rows: int
    columns: int
    side: int
    pixels: bytes = field(repr=False)

    @property
    def num_tokens(self) -> int:
        """The number of its tokens."""
        return self.rows * self.columns

    @property
    def token_ids(self) -> range:
        """The ids of its tokens."""
        return range(self.first_id, self.first_id + self.num_tokens)

    @property
    def shift(self) -> int:
        """The difference between positions and indices behind it: at most 0.

        A picture counts as many positions as its longer side has tokens.
        """
        return max(self.rows, self.columns) - self.num_tokens


def total_shift(pictures: Iterable[Picture]) -> int:
    """Return the difference between positions and indices behind all pictures of a prompt."""
    return sum(picture.shift for picture in pictures)
