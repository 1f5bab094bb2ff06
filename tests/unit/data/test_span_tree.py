# SPDX-License-Identifier: Apache-2.0
"""Trees of spans: shared beginnings, and rows in which each drawn span carries loss once (M5)."""

from __future__ import annotations

import random

from tandem.data.span_tree import ROOT, SpanTree, rows_of
from tandem.types import Completion, FinishReason, Trajectory


def completion(*ids: int) -> Completion:
    return Completion(4, ids, [-1.0] * len(ids), FinishReason.STOP, 0)


def test_a_conversation_shares_whole_spans_and_gets_the_rest_as_given_tokens() -> None:
    tree = SpanTree()
    prompt = tree.give((1, 2), after=ROOT)
    said = tree.draw(completion(3, 4), after=prompt)
    assert tree.find((1, 2, 3, 4, 5)) == (said, 4)
    assert tree.find((1, 2, 3, 9)) == (prompt, 2), "a part of a drawn span is not shared"
    assert tree.find((1, 9)) == (ROOT, 0)
    assert tree.give((), after=said) == said
    fork = tree.give((7,), after=prompt)
    assert list(tree.ids_to(fork)) == [1, 2, 7] and tree.num_tokens == 5
    assert tree.find((1, 2, 7, 8)) == (fork, 3)


def test_a_line_is_its_own_row() -> None:
    tree = SpanTree()
    said = tree.draw(completion(3), after=tree.give((1,), after=ROOT))
    line = Trajectory(4, tuple(tree.spans))
    assert rows_of(line) == (line,)
    as_tree = Trajectory(4, tuple(tree.spans), parents=tuple(tree.parents))
    (row,) = rows_of(as_tree)
    assert row == line and said == 1


def test_every_drawn_token_has_loss_once_in_random_trees() -> None:
    rng = random.Random(0)
    for _ in range(200):
        tree = SpanTree()
        ends = [tree.give((0,), after=ROOT)]
        number = 1
        for _ in range(rng.randint(1, 12)):
            after = rng.choice([*ends, ROOT]) if rng.random() < 0.5 else ends[-1]
            given = tree.give((number,), after=after)
            ends.append(tree.draw(completion(number + 1, number + 2), after=given))
            number += 3
        forked = Trajectory(4, tuple(tree.spans), parents=tuple(tree.parents))
        rows = rows_of(forked)
        with_loss = [token for row in rows for one in row.completions for token in one.token_ids]
        drawn = [token for one in forked.completions for token in one.token_ids]
        assert sorted(with_loss) == sorted(drawn)
        leaves = [i for i in range(len(tree.spans)) if i not in tree.parents and i > 0]
        assert len(rows) == len(leaves)
        for row, leaf in zip(rows, leaves, strict=True):
            ids = [token for span in row.spans for token in span.token_ids]
            assert ids == list(tree.ids_to(leaf))
            seen = {token for span in row.spans for token in span.token_ids}
            first = {token for one in row.completions for token in one.token_ids}
            assert first == seen & set(drawn), "the first row that holds a span trains it"
            drawn = [token for token in drawn if token not in seen]
