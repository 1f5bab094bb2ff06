# SPDX-License-Identifier: Apache-2.0
"""The tree of the spans of one sample: a conversation that forks where its history is rewritten.

Nearly every tree is a line. Where a conversation goes on from other tokens than it had, it shares
the whole spans that are equal and gets the rest as given tokens. A row is the way from a root to a
leaf. Each drawn span carries loss in the first row that holds it and is context in the others, so
that every drawn token is trained on exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from tandem.types import Completion, EpisodeRecord, FinishReason, Span, Trajectory

ROOT = -1
"""The parent of a span with which a conversation begins."""


class SpanTree:
    """The spans of a sample while they grow.

    Attributes:
        spans: the spans in the order in which they were added.
        parents: the index of the span before each one; ``ROOT`` for none.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.parents: list[int] = []

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all spans; each counts once."""
        return sum(len(span.token_ids) for span in self.spans)

    def give(self, token_ids: Sequence[int], *, after: int) -> int:
        """Add given tokens behind the span ``after`` and return the index of their span.

        Without tokens there is nothing to add, and the result is ``after``.
        """
        return self._add(Span(token_ids), after) if len(token_ids) else after

    def draw(self, completion: Completion, *, after: int) -> int:
        """Add drawn tokens behind the span ``after`` and return the index of their span."""
        return self._add(Span(completion.token_ids, completion), after)

    def draw_nothing(self, sample_id: int, *, after: int, version: int) -> int:
        """Add an empty turn, for an episode without any, and return the index of its span."""
        nothing = array("i"), array("f")
        return self.draw(Completion(sample_id, *nothing, FinishReason.STOP, version), after=after)

    def ids_to(self, index: int) -> array[int]:
        """Return the tokens from the root to the end of a span."""
        path = path_to(index, self.parents)
        return array("i", chain.from_iterable(self.spans[i].token_ids for i in path))

    def find(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Return the way of whole spans that begins ``token_ids`` with the most tokens.

        Returns:
            The index of its last span, ``ROOT`` if there is none, and its number of tokens.
        """
        wanted = array("i", token_ids)
        reach = {ROOT: 0}
        for index, (span, parent) in enumerate(zip(self.spans, self.parents, strict=True)):
            start = reach.get(parent)
            ids = array("i", span.token_ids)
            if start is not None and wanted[start : start + len(ids)] == ids:
                reach[index] = start + len(ids)
        return max(reach.items(), key=lambda entry: entry[1])

    def trajectory(
        self, sample_id: int, record: EpisodeRecord, *, ends: Iterable[int] | None = None
    ) -> Trajectory:
        """Return the spans as a trajectory; a tree that never forked is a line.

        Args:
            ends: the spans up to which ways are kept, others are left out; None to keep all.
        """
        kept = range(len(self.spans))
        if ends is not None:
            kept = sorted({i for end in ends for i in path_to(end, self.parents)})
        place = {ROOT: ROOT, **{index: number for number, index in enumerate(kept)}}
        parents = tuple(place[self.parents[index]] for index in kept)
        is_line = parents == tuple(range(-1, len(parents) - 1))
        spans = tuple(self.spans[index] for index in kept)
        return Trajectory(sample_id, spans, record, () if is_line else parents)

    def _add(self, span: Span, after: int) -> int:
        self.spans.append(span)
        self.parents.append(after)
        return len(self.spans) - 1


def path_to(index: int, parents: Sequence[int]) -> list[int]:
    """Return the indices of the spans from the root to ``index``."""
    path: list[int] = []
    while index != ROOT:
        path.append(index)
        index = parents[index]
    return path[::-1]


def rows_of(trajectory: Trajectory) -> tuple[Trajectory, ...]:
    """Return the rows of a trajectory, one for each leaf: lines whose drawn spans carry loss.

    Example:
        A prompt 0, a turn 1, a message 2 and a turn 3 are a line. A message 4 that follows the
        prompt, and a turn 5, make a second row: (0, 4, 5). If 4 follows the turn 1, the second row
        is (0, 1, 4, 5), where 1 has become given tokens.
    """
    if not trajectory.parents:
        return (trajectory,)
    spans, parents = trajectory.spans, trajectory.parents
    inner, trained = set(parents), set[int]()
    rows: list[Trajectory] = []
    for leaf in range(len(spans)):
        if leaf in inner:
            continue
        path = path_to(leaf, parents)
        row = tuple(Span(spans[i].token_ids) if i in trained else spans[i] for i in path)
        if any(span.completion is not None for span in row):
            rows.append(Trajectory(trajectory.sample_id, row, trajectory.episode))
            trained.update(path)
    return tuple(rows)
