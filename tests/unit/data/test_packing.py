# SPDX-License-Identifier: Apache-2.0
"""Packing: every loss token sees exactly its own prompt and response, however batches are cut."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.data.packing import (
    Plan,
    TrainSequence,
    in_sequence_order,
    pack,
    pack_microbatches,
    plan_microbatches,
    with_packed_routes,
)
from tandem.errors import UserError
from tandem.types import LossColumns, PackedBatch

SHARED = (
    TrainSequence(0, (10, 11, 12), (20, 21)),
    TrainSequence(0, (10, 11, 12), (30, 31, 32, 33)),
)


def random_sequences(seed: int, *, num_groups: int = 12) -> list[TrainSequence]:
    """Groups of 1 to 5 responses of 0 to 9 tokens, some with a loss mask."""
    chance = random.Random(seed)
    sequences: list[TrainSequence] = []
    for key in range(num_groups):
        prompt = tuple(chance.choices(range(100), k=chance.randint(1, 6)))
        for _ in range(chance.randint(1, 5)):
            response = tuple(chance.choices(range(100), k=chance.randint(0, 9)))
            mask = tuple(chance.random() < 0.5 for _ in response) if chance.random() < 0.3 else None
            sequences.append(TrainSequence(key, prompt, response, mask))
    return sequences


def loss_positions(sequence: TrainSequence) -> list[int]:
    mask = sequence.loss_mask or (True,) * len(sequence.response_ids)
    return [position for position, counts in enumerate(mask) if counts]


def context(batch: PackedBatch, index: int) -> tuple[list[int], list[int]]:
    """Ids and positions of all tokens that the token at ``index`` attends to, by the segments."""
    segments = batch.segments
    fields = (
        segments.start_S,
        segments.length_S,
        segments.prefix_start_S,
        segments.prefix_length_S,
    )
    for start, length, prefix_start, prefix_length in zip(
        *(field.tolist() for field in fields), strict=True
    ):
        if start <= index < start + length:
            seen = [*range(prefix_start, prefix_start + prefix_length), *range(start, index + 1)]
            return batch.token_ids_T[seen].tolist(), batch.position_ids_T[seen].tolist()
    raise AssertionError(f"token {index} is in no segment")


def check(batch: PackedBatch, sequences: list[TrainSequence]) -> None:
    """Each loss token is predicted from its prompt and the response before it, and nothing else."""
    assert batch.num_sequences == len(sequences)
    expected = [
        (number, list(sequence.prompt_ids + sequence.response_ids[:position]), target)
        for number, sequence in enumerate(sequences)
        for position in loss_positions(sequence)
        for target in [sequence.response_ids[position]]
    ]
    assert batch.sequence_R.tolist() == [number for number, _, _ in expected]
    assert batch.target_R.tolist() == [target for _, _, target in expected]
    for source, (_, ids, _) in zip(batch.source_R.tolist(), expected, strict=True):
        assert context(batch, source) == (ids, list(range(len(ids))))


def check_tiling(batch: PackedBatch) -> None:
    starts, lengths = batch.segments.start_S.tolist(), batch.segments.length_S.tolist()
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == len(batch.token_ids_T) == len(batch.position_ids_T)
    assert min(lengths) > 0


def test_a_shared_prompt_is_stored_once() -> None:
    """The example of ``types.Segments``; last tokens predict nothing and are left out."""
    batch = pack(SHARED)
    assert batch.token_ids_T.tolist() == [10, 11, 12, 20, 30, 31, 32]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 3, 4, 5]
    assert batch.segments.start_S.tolist() == [0, 3, 4]
    assert batch.segments.length_S.tolist() == [3, 1, 3]
    assert batch.segments.prefix_start_S.tolist() == [0, 0, 0]
    assert batch.segments.prefix_length_S.tolist() == [0, 3, 3]
    assert batch.source_R.tolist() == [2, 3, 2, 4, 5, 6]
    assert batch.target_R.tolist() == [20, 21, 30, 31, 32, 33]
    assert batch.sequence_R.tolist() == [0, 0, 1, 1, 1, 1]


def test_a_prompt_with_one_response_is_one_segment() -> None:
    batch = pack([SHARED[0], TrainSequence(1, (7,), (8, 9))])
    assert batch.segments.start_S.tolist() == [0, 4]
    assert batch.segments.length_S.tolist() == [4, 2]
    assert batch.segments.prefix_length_S.tolist() == [0, 0]
    assert batch.position_ids_T.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.source_R.tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("numbers", [tuple, lambda ids: array("i", ids)])
def test_tensors_are_int64(numbers: Callable[[tuple[int, ...]], Sequence[int]]) -> None:
    sequences = [replace(s, response_ids=numbers(s.response_ids)) for s in SHARED]
    batch = pack([*sequences, TrainSequence(1, numbers((5,)), numbers(()))])
    assert batch.token_ids_T.tolist() == [10, 11, 12, 20, 30, 31, 32, 5]
    assert batch.target_R.tolist() == [20, 21, 30, 31, 32, 33]
    segments = batch.segments
    for tensor in (
        batch.token_ids_T,
        batch.position_ids_T,
        batch.source_R,
        batch.target_R,
        batch.sequence_R,
        segments.start_S,
        segments.length_S,
        segments.prefix_start_S,
        segments.prefix_length_S,
    ):
        assert tensor.dtype == torch.int64
        assert tensor.ndim == 1


@pytest.mark.parametrize("seed", range(8))
def test_every_loss_token_sees_its_own_context(seed: int) -> None:
    sequences = random_sequences(seed)
    batch = pack(sequences)
    check(batch, sequences)
    check_tiling(batch)


def test_an_empty_response_carries_no_loss() -> None:
    sequences = [
        TrainSequence(0, (1, 2), ()),
        TrainSequence(0, (1, 2), (3,)),
        TrainSequence(1, (4,), ()),
    ]
    batch = pack(sequences)
    check(batch, sequences)
    check_tiling(batch)
    assert batch.token_ids_T.tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        ([TrainSequence(0, (), (1,))], "empty prompt"),
        ([TrainSequence(0, (1,), (2,)), TrainSequence(0, (9,), (2,))], "two different prompts"),
        ([TrainSequence(0, (1,), (2, 3), (True,))], "1 entries for 2 tokens"),
    ],
)
def test_impossible_sequences_are_refused(sequences: list[TrainSequence], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(sequences)


def test_columns_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="5 entries for 6 loss tokens"):
        pack(SHARED, LossColumns(torch.zeros(5)))
    with pytest.raises(ValueError, match="5 entries for 6 loss tokens"):
        pack_microbatches(SHARED, [[0], [1]], columns=LossColumns(torch.zeros(5)))


PLANS = (
    {},
    {"max_sequences": 1},
    {"max_sequences": 4},
    {"max_tokens": 15},
    {"max_tokens": 40},
    {"max_tokens": 10_000},
)


@pytest.mark.parametrize("limits", PLANS, ids=str)
def test_columns_travel_with_their_tokens_and_results_come_back_in_order(
    limits: dict[str, int],
) -> None:
    sequences = random_sequences(3)
    plan = plan_microbatches(sequences, **limits)
    assert sorted(i for members in plan for i in members) == list(range(len(sequences)))
    count = sum(len(loss_positions(sequence)) for sequence in sequences)
    columns = LossColumns(
        advantages_R=torch.arange(count).float(), ref_logp_R=-torch.arange(count).float()
    )
    batches = pack_microbatches(sequences, plan, columns=columns)
    for batch, members in zip(batches, plan, strict=True):
        check(batch, [sequences[i] for i in members])
        check_tiling(batch)
    parts = [batch.columns.advantages_R for batch in batches if batch.columns]
    refs = [batch.columns.ref_logp_R for batch in batches if batch.columns]
    assert all(batch.columns and batch.columns.old_logp_R is None for batch in batches)
    for values, whole in ((parts, columns.advantages_R), (refs, columns.ref_logp_R)):
        assert torch.equal(in_sequence_order(values, sequences=sequences, plan=plan), whole)
    targets = [batch.target_R for batch in batches]
    assert torch.equal(
        in_sequence_order(targets, sequences=sequences, plan=plan), pack(sequences).target_R
    )


def test_a_plan_may_cover_some_sequences_only() -> None:
    columns = LossColumns(torch.arange(6).float())
    (batch,) = pack_microbatches(SHARED, [[1]], columns=columns)
    assert batch.columns is not None
    assert batch.columns.advantages_R.tolist() == [2, 3, 4, 5]


def packed_tokens(sequences: list[TrainSequence], plan: Plan) -> list[int]:
    return [len(batch.token_ids_T) for batch in pack_microbatches(sequences, plan)]


def test_by_count_the_last_one_is_smaller() -> None:
    sequences = [TrainSequence(i // 5, (1,), (2, 3)) for i in range(50)]
    plan = plan_microbatches(sequences, max_sequences=20)
    assert [len(members) for members in plan] == [20, 20, 10]
    assert packed_tokens(sequences, plan) == [24, 24, 12]


def test_sequences_of_one_prompt_come_together() -> None:
    sequences = [TrainSequence(i % 2, (1, 1, 1), (2,)) for i in range(6)]
    assert plan_microbatches(sequences, max_sequences=3) == [[0, 2, 4], [1, 3, 5]]
    assert plan_microbatches(sequences, max_tokens=6) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_tokens", [15, 24, 60])
def test_a_token_budget_is_kept_and_groups_that_fit_stay_whole(seed: int, max_tokens: int) -> None:
    sequences = random_sequences(seed, num_groups=40)
    plan = plan_microbatches(sequences, max_tokens=max_tokens)
    assert plan == plan_microbatches(sequences, max_tokens=max_tokens)
    assert max(packed_tokens(sequences, plan)) <= max_tokens
    for key in range(40):
        group = [i for i, sequence in enumerate(sequences) if sequence.prompt_key == key]
        responses = sum(len(sequences[i].response_ids) for i in group)
        size = len(sequences[group[0]].prompt_ids) + responses
        homes = sum(any(i in members for i in group) for members in plan)
        assert homes == 1 or size > max_tokens


def test_budgeted_microbatches_are_even() -> None:
    sequences = [TrainSequence(i, (1,) * 10, (2,) * (10 + i % 7)) for i in range(100)]
    sizes = packed_tokens(sequences, plan_microbatches(sequences, max_tokens=256))
    assert len(sizes) == 10  # 2295 tokens need at least 9; 9 bins of whole sequences overflow
    assert max(sizes) - min(sizes) <= 20


def test_a_budget_below_the_longest_sequence_names_what_it_takes() -> None:
    with pytest.raises(UserError) as error:
        plan_microbatches(SHARED, max_tokens=6)
    assert str(error.value).startswith("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6: ")
    assert "ppo_max_token_len_per_gpu=7 or more" in str(error.value)
    assert plan_microbatches(SHARED, max_tokens=7) == [[0], [1]]


def test_limits_exclude_each_other_and_nothing_gives_nothing() -> None:
    with pytest.raises(ValueError, match="not by both"):
        plan_microbatches(SHARED, max_sequences=1, max_tokens=10)
    assert plan_microbatches([], max_tokens=10) == []


def test_branches_belong_to_their_sequence_in_any_plan() -> None:
    """The loss tokens of a branch follow those of its sequence; each sees its own row only."""
    branch = TrainSequence(-9, (10, 40), (41, 42, 43), (False, True, True))
    forked = replace(SHARED[0], branches=(branch,))
    sequences = [forked, SHARED[1], TrainSequence(1, (7,), (8, 9))]
    batch = pack(sequences)
    check_tiling(batch)
    assert batch.target_R.tolist() == [20, 21, 42, 43, 30, 31, 32, 33, 8, 9]
    assert batch.sequence_R.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.token_ids_T.tolist() == [10, 11, 12, 20, 30, 31, 32, 7, 8, 10, 40, 41, 42]
    seen = [context(batch, source)[0] for source in batch.source_R.tolist()]
    assert seen[2:4] == [[10, 40, 41], [10, 40, 41, 42]]
    assert seen[4] == [10, 11, 12]
    values_R = torch.arange(10.0)
    columns = LossColumns(advantages_R=values_R)
    for plan in ([[0, 1, 2]], [[2], [1], [0]], [[1, 2], [0]]):
        parts = pack_microbatches(sequences, plan, columns=columns)
        taken = [part.columns.advantages_R for part in parts if part.columns is not None]
        assert torch.equal(in_sequence_order(taken, sequences=sequences, plan=plan), values_R)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_limit_in_tokens_holds_for_rows_and_not_for_forked_sequences(num_ranks: int) -> None:
    branch = TrainSequence(-9, (10, 40), (41, 42, 43))
    sequences = [replace(SHARED[0], branches=(branch,)), SHARED[1]]
    plan = plan_microbatches(sequences, max_tokens=8, multiple_of=num_ranks)
    assert sorted(plan) == [[0], [1]], "10 tokens of a forked sequence are one micro-batch"
    with pytest.raises(UserError, match="longest sequence, which has 7 tokens"):
        plan_microbatches(sequences, max_tokens=6, multiple_of=num_ranks)


def test_mo8_routes_of_micro_batches_return_to_their_sequences() -> None:
    """A prompt's rows are those of its key; a response's are its own. Some samples have forked."""

    def routed(row: TrainSequence, number: int) -> TrainSequence:
        prompt = [[row.prompt_key % 97, place] for place in range(len(row.prompt_ids))]
        own = [[100 + number, place] for place in range(len(row.response_ids) - 1)]
        branches = tuple(routed(branch, 60 + number) for branch in row.branches)
        routes = np.array(prompt + own, np.uint8)[:, :, None]
        return replace(row, branches=branches, routes=routes)

    def without(row: TrainSequence) -> TrainSequence:
        return replace(row, branches=tuple(map(without, row.branches)), routes=None)

    rows = random_sequences(3, num_groups=8)
    for i in (1, 4):
        rows[i] = replace(rows[i], branches=(TrainSequence(-1 - i, (1, 2), (3, 4, 5)),))
    wanted = [routed(row, number) for number, row in enumerate(rows)]
    plan = plan_microbatches(wanted, max_tokens=40)[::-1]
    assert len(plan) > 2
    routes = [batch.routes_TLK for batch in pack_microbatches(wanted, plan)]
    assert all(x is not None for x in routes)
    found = with_packed_routes(routes, sequences=[*map(without, wanted)], plan=plan)  # type: ignore[arg-type]
    for one, other in zip(found, wanted, strict=True):
        for row, expected in zip((one, *one.branches), (other, *other.branches), strict=True):
            assert row.response_ids == expected.response_ids
            assert np.array_equal(row.routes, expected.routes)
