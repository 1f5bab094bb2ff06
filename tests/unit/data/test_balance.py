# SPDX-License-Identifier: Apache-2.0
"""Work over ranks in lock-step: every rank has some, rounds are even, groups are split for it only
where they must be."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from tandem.data.balance import batch_cost, deal, seqlen_metrics, token_cost
from tandem.data.packing import Plan, TrainSequence, pack, pack_microbatches, plan_microbatches
from tandem.errors import UserError


def sequences_of(seed: int, *, num_groups: int, n: int) -> list[TrainSequence]:
    """Groups of ``n`` with prompts of 16 to 64 tokens and long-tailed responses."""
    chance = random.Random(seed)
    sequences: list[TrainSequence] = []
    for key in range(num_groups):
        prompt = (1,) * chance.randint(16, 64)
        for _ in range(n):
            length = min(1024, 8 + int(chance.expovariate(1 / 150)))
            sequences.append(TrainSequence(key, prompt, (2,) * length))
    return sequences


def costs_of(sequences: list[TrainSequence], plan: Plan) -> list[int]:
    return [batch_cost(batch) for batch in pack_microbatches(sequences, plan)]


def efficiency(sequences: list[TrainSequence], plan: Plan, *, num_ranks: int) -> float:
    """What it would cost all ranks to compute each prompt once, over what rounds really last."""
    costs = costs_of(sequences, plan)
    dealt = deal(costs, num_ranks)
    rounds = [
        max(costs[rank[turn]] for rank in dealt if turn < len(rank))
        for turn in range(max(map(len, dealt)))
    ]
    (whole,) = plan_microbatches(sequences)
    return batch_cost(pack([sequences[i] for i in whole])) / (num_ranks * sum(rounds))


def test_the_cost_of_a_sequence_is_verls_whatever_it_is_cut_into() -> None:
    assert token_cost(100) == 24576 * 100 + 100**2
    assert token_cost(30) + token_cost(70, prefix=30) == token_cost(100)


def test_a_batch_costs_what_its_sequences_do_and_a_shared_prompt_once() -> None:
    alone = pack([TrainSequence(0, (1,) * 30, (2,) * 71)])
    assert batch_cost(alone) == token_cost(100)
    shared = pack([TrainSequence(0, (1,) * 30, (2,) * 71)] * 3)
    assert batch_cost(shared) == token_cost(30) + 3 * token_cost(70, prefix=30)


def test_rounds_have_alike_costs_and_ranks_alike_totals() -> None:
    assert deal([10, 50, 40, 20], 2) == [[1, 0], [2, 3]]
    assert deal([1, 1, 1, 1, 1, 1], 3) == [[0, 3], [1, 4], [2, 5]]
    assert deal([], 2) == [[], []]


def test_a_short_last_round_goes_to_the_ranks_that_did_least() -> None:
    dealt = deal([9, 8, 7, 6, 1], 2)
    assert dealt == [[0, 3, 4], [1, 2]]
    assert deal([5], 3) == [[0], [], []]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "limits",
    [{}, {"max_sequences": 3}, {"max_sequences": 16}, {"max_tokens": 1100}, {"max_tokens": 4096}],
    ids=str,
)
def test_every_rank_has_work_in_every_round_within_the_limits(
    seed: int, num_ranks: int, limits: dict[str, int]
) -> None:
    sequences = sequences_of(seed, num_groups=12, n=4)
    plan = plan_microbatches(sequences, multiple_of=num_ranks, **limits)
    assert plan == plan_microbatches(sequences, multiple_of=num_ranks, **limits)
    assert sorted(chain.from_iterable(plan)) == list(range(len(sequences)))
    assert all(plan)
    assert len(plan) % num_ranks == 0
    assert max(map(len, plan)) <= limits.get("max_sequences", len(sequences))
    batches = pack_microbatches(sequences, plan)
    assert max(len(batch.token_ids_T) for batch in batches) <= limits.get("max_tokens", 10**6)
    by_number = plan_microbatches(sequences, multiple_of=num_ranks, by_cost=False, **limits)
    found = [efficiency(sequences, cut, num_ranks=num_ranks) for cut in (plan, by_number)]
    assert found[0] > 0.98 * found[1]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_many_groups_are_even_and_stay_whole(num_ranks: int) -> None:
    sequences = sequences_of(0, num_groups=128, n=8)
    for limits in ({"max_tokens": 16384}, {"max_sequences": 32}):
        plan = plan_microbatches(sequences, multiple_of=num_ranks, **limits)
        assert efficiency(sequences, plan, num_ranks=num_ranks) > 0.97
        homes = [{sequences[i].prompt_key for i in members} for members in plan]
        assert sum(map(len, homes)) == 128


def test_one_group_is_split_over_the_ranks() -> None:
    group = [TrainSequence(7, (1,) * 50, (2,) * 100)] * 8
    assert [len(members) for members in plan_microbatches(group, multiple_of=4)] == [2] * 4
    plan = plan_microbatches(group, multiple_of=4, max_tokens=10_000)
    assert [len(members) for members in plan] == [2] * 4


def test_a_group_is_split_for_the_sake_of_balance_only() -> None:
    """Three equal groups on two ranks: the third is halved. Four: none is."""
    three = [TrainSequence(key, (1,) * 10, (2,) * 500) for key in range(3) for _ in range(4)]
    assert sorted(map(len, plan_microbatches(three, multiple_of=2))) == [6, 6]
    four = three + [TrainSequence(3, (1,) * 10, (2,) * 500)] * 4
    plan = plan_microbatches(four, multiple_of=2)
    assert [len({four[i].prompt_key for i in members}) for members in plan] == [2, 2]


def test_a_group_larger_than_the_limit_is_split() -> None:
    group = [TrainSequence(0, (1,) * 50, (2,) * 100)] * 12
    plan = plan_microbatches(group, multiple_of=2, max_sequences=2)
    assert sorted(map(len, plan)) == [2] * 6
    plan = plan_microbatches(group, multiple_of=2, max_tokens=360)
    assert len(plan) == 4 and max(map(len, plan)) == 3


def test_long_sequences_weigh_more_than_their_tokens() -> None:
    """Of the same number of tokens: one long sequence costs more than many short ones."""
    sequences = [TrainSequence(0, (1,), (2,) * 40_000)]
    sequences += [TrainSequence(i, (1,), (2,) * 1000) for i in range(1, 121)]
    plan = plan_microbatches(sequences, multiple_of=2)
    costs = costs_of(sequences, plan)
    assert max(costs) < 1.02 * min(costs)
    (alone,) = (members for members in plan if 0 in members)
    tokens = sum(len(sequences[i].response_ids) for i in alone)
    assert tokens < 0.75 * (40_000 + 120_000) / 2
    even = plan_microbatches(sequences, multiple_of=2, by_cost=False)
    assert sorted(map(len, even)) == [60, 61]


def test_fewer_sequences_than_ranks_leave_ranks_idle() -> None:
    sequences = sequences_of(1, num_groups=3, n=1)
    for limits in ({}, {"max_sequences": 1}, {"max_tokens": 2000}):
        plan = plan_microbatches(sequences, multiple_of=8, **limits)
        assert plan == [[0], [1], [2]]
        assert sum(1 for rank in deal(costs_of(sequences, plan), 8) if rank) == 3


def test_one_sequence_a_micro_batch_need_not_fill_the_last_round() -> None:
    sequences = sequences_of(1, num_groups=5, n=1)
    plan = plan_microbatches(sequences, multiple_of=4, max_sequences=1)
    assert sorted(plan) == [[i] for i in range(5)]


def test_one_rank_has_the_plan_it_always_had() -> None:
    sequences = sequences_of(2, num_groups=12, n=4)
    for limits in ({}, {"max_sequences": 5}, {"max_tokens": 2000}):
        assert plan_microbatches(sequences, multiple_of=1, **limits) == plan_microbatches(
            sequences, **limits
        )


def test_a_budget_below_the_longest_sequence_is_refused_for_many_ranks_too() -> None:
    with pytest.raises(UserError, match=r"my\.key=10: must hold the longest sequence"):
        plan_microbatches(
            sequences_of(0, num_groups=2, n=2), max_tokens=10, multiple_of=2, key="my.key"
        )
    assert plan_microbatches([], max_tokens=10, multiple_of=2) == []


def test_the_metrics_are_verls() -> None:
    found = seqlen_metrics([10, 20, 30, 40], [[0, 3], [1, 2]])
    assert found == {
        "global_seqlen/min": 30.0,
        "global_seqlen/max": 70.0,
        "global_seqlen/minmax_diff": 40.0,
        "global_seqlen/balanced_min": 50.0,
        "global_seqlen/balanced_max": 50.0,
        "global_seqlen/mean": 50.0,
    }
    odd = seqlen_metrics([1, 2, 3], [[0], [1], [], [2]])
    assert (odd["global_seqlen/min"], odd["global_seqlen/balanced_min"]) == (0.0, 0.0)
    assert odd["global_seqlen/mean"] == 1.5
