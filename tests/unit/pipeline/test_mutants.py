# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the rule of tokens and in masks, which other tests must notice (M30).

Each mutant puts one mistake into the code. The named tests must fail with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from tandem.data import packing, span_tree
from tandem.data.dialogue import Dialogue
from tandem.data.span_tree import rows_of
from tandem.pipeline import batch, experience
from tandem.types import Group, Span, Trajectory
from tests.unit.data import test_dialogue, test_span_tree
from tests.unit.pipeline import test_batch

BETWEEN, CLOSING = Dialogue.between, Dialogue._closing  # pyright: ignore[reportPrivateUsage]
LAY_OUT, MASK = batch.lay_out, Trajectory.loss_mask
Check = Callable[[], None]
Place = tuple[type | ModuleType, str]

QWEN = partial(test_dialogue.test_m1_tokens_are_those_of_the_whole_conversation, "qwen2_5", 1)
GLM = partial(test_dialogue.test_m1_tokens_are_those_of_the_whole_conversation, "glm4moe", 1)
USER = partial(test_dialogue.test_m1_tokens_after_a_message_of_the_user, "qwen2_5")
RANDOM = test_dialogue.test_m2_given_tokens_never_depend_on_drawn_ones
COLUMNS = test_batch.test_m4_columns_cover_the_drawn_tokens_in_order
GRADIENT = test_batch.test_m4_given_tokens_get_no_gradient
FORK = test_batch.test_m5_a_fork_is_a_branch_of_its_sample_and_no_sample_of_its_own
REJECTED = test_batch.test_m5_rejection_reaches_the_tokens_of_a_branch
TREES = test_span_tree.test_every_drawn_token_has_loss_once_in_random_trees


def keeps_the_closing_token(self: Dialogue, messages: Any, *, last_id: int) -> list[int]:
    return BETWEEN(self, messages, last_id=-1)


def drops_the_closing_token(self: Dialogue, messages: Any, *, last_id: int) -> list[int]:
    return BETWEEN(self, messages, last_id=-1)[1:]


def without_the_separator(self: Dialogue, text: str) -> list[int]:
    return CLOSING(self, text)[:1]


def without_the_closing_tokens(self: Dialogue, text: str) -> list[int]:
    return []


def rewrites_the_turn(self: Dialogue, messages: Any, *, last_id: int) -> list[int]:
    """Let the given tokens depend on what was drawn."""
    return BETWEEN(self, messages, last_id=last_id) + [last_id] * (last_id % 2)


def inverted(self: Trajectory) -> tuple[bool, ...] | None:
    mask = MASK.fget(self)  # type: ignore[attr-defined]
    return None if mask is None else tuple(not flag for flag in mask)


def shifted(self: Trajectory) -> tuple[bool, ...] | None:
    mask = MASK.fget(self)  # type: ignore[attr-defined]
    return None if mask is None else (mask[-1], *mask[:-1])


def with_loss_in_all_rows(trajectory: Trajectory) -> tuple[Trajectory, ...]:
    rows = rows_of(trajectory)
    lines = _lines_of(trajectory)
    return tuple(replace(row, spans=line) for row, line in zip(rows, lines, strict=True))


def with_loss_in_the_last_row(trajectory: Trajectory) -> tuple[Trajectory, ...]:
    """Let each drawn span carry loss where it occurs last; rows without any are left out."""
    seen: set[int] = set()
    rows: list[Trajectory] = []
    for line in reversed(_lines_of(trajectory)):
        spans = tuple(Span(span.token_ids) if id(span) in seen else span for span in line)
        seen.update(map(id, line))
        rows.append(Trajectory(trajectory.sample_id, spans, trajectory.episode))
    return tuple(rows[::-1])


def _lines_of(trajectory: Trajectory) -> list[tuple[Span, ...]]:
    """Return the spans of each way from the root to a leaf."""
    parents = trajectory.parents or tuple(range(-1, len(trajectory.spans) - 1))
    leaves = [i for i in range(len(parents)) if i not in parents]
    paths = [span_tree.path_to(leaf, parents) for leaf in leaves]
    return [tuple(trajectory.spans[i] for i in path) for path in paths]


def with_a_sample_for_each_row(groups: Sequence[Group], *, version: int = 0) -> batch.Batch:
    """Let a baseline count rows."""
    by_row = [
        replace(
            group,
            samples=tuple(
                replace(sample, trajectory=row)
                for sample in group.samples
                for row in rows_of(sample.trajectory)
            ),
        )
        for group in groups
    ]
    return LAY_OUT(by_row, version=version)


def in_order_of_rows(rows: Any, sequence_R: Any, *, branches: bool) -> Any:  # noqa: N803
    return packing_order(rows, sequence_R, branches=False)


def branches_first(sequence: Any, kept: Any) -> Any:
    branches = tuple(masked(row, kept) for row in sequence.branches)
    own = masked(replace(sequence, branches=()), kept)
    return replace(own, branches=branches)


packing_order = packing._loss_order  # pyright: ignore[reportPrivateUsage]
masked = experience._masked  # pyright: ignore[reportPrivateUsage]

MUTANTS: dict[str, tuple[Place, Any, tuple[Check, ...]]] = {
    "the token that closes a turn is doubled": (
        (Dialogue, "between"),
        keeps_the_closing_token,
        (QWEN, GLM, USER, RANDOM),
    ),
    "a turn that was cut off is not closed": (
        (Dialogue, "between"),
        drops_the_closing_token,
        (RANDOM,),
    ),
    "the separator after a turn is lost": (
        (Dialogue, "_closing"),
        without_the_separator,
        (QWEN, USER),
    ),
    "a turn is never closed": (
        (Dialogue, "_closing"),
        without_the_closing_tokens,
        (QWEN, USER, RANDOM),
    ),
    "given tokens depend on drawn ones": ((Dialogue, "between"), rewrites_the_turn, (RANDOM,)),
    "loss on the text of tools": (
        (Trajectory, "loss_mask"),
        property(inverted),
        (COLUMNS, GRADIENT, FORK),
    ),
    "loss on all tokens": (
        (Trajectory, "loss_mask"),
        property(lambda self: None),
        (COLUMNS, FORK),
    ),
    "a mask that is shifted by a token": (
        (Trajectory, "loss_mask"),
        property(shifted),
        (COLUMNS, GRADIENT, FORK),
    ),
    "a drawn span carries loss in each row": (
        (test_span_tree, "rows_of"),
        with_loss_in_all_rows,
        (TREES,),
    ),
    "a drawn span carries loss in its last row": (
        (test_span_tree, "rows_of"),
        with_loss_in_the_last_row,
        (TREES,),
    ),
    "the baseline counts rows": (
        (test_batch, "lay_out"),
        with_a_sample_for_each_row,
        (FORK,),
    ),
    "loss tokens of branches stand behind those of all samples": (
        (packing, "_loss_order"),
        in_order_of_rows,
        (FORK,),
    ),
    "rejected tokens are those of another row": (
        (experience, "_masked"),
        branches_first,
        (REJECTED,),
    ),
}
"""By what is wrong: what is replaced, by what, and the tests that must fail with it."""

CASES = [
    pytest.param(place, wrong, check, id=f"{name}: {getattr(check, 'func', check).__name__}")
    for name, (place, wrong, checks) in MUTANTS.items()
    for check in checks
]


@pytest.mark.parametrize(("place", "wrong", "check"), CASES)
def test_m30_a_mutant_is_noticed(
    monkeypatch: pytest.MonkeyPatch, place: Place, wrong: Any, check: Check
) -> None:
    monkeypatch.setattr(*place, wrong)
    with pytest.raises((AssertionError, ValueError)):
        check()
