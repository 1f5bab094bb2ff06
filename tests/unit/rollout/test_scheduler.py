# SPDX-License-Identifier: Apache-2.0
"""The scheduler as arithmetic: who enters when, which rows move, what is prefilled."""

from __future__ import annotations

from dataclasses import replace

from tandem.rollout.native.scheduler import Admission, Scheduler
from tandem.rollout.settings import Limits
from tandem.types import GenerationRequest, SamplingParams

PROMPT = (0, 1, 2)


def _request(first_id: int, *, n: int = 2, prompt: int = 3, new: int = 4) -> GenerationRequest:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new)
    return GenerationRequest(tuple(range(first_id, first_id + n)), tuple(range(prompt)), sampling)


def _scheduler(
    *, sequences: int = 1000, prefill: int = 10_000, cache: int = 1_000_000
) -> Scheduler:
    return Scheduler(Limits(sequences, prefill), max_cache_tokens=cache)


def _admit_all(scheduler: Scheduler) -> list[Admission]:
    admissions: list[Admission] = []
    while (admission := scheduler.admit()) is not None:
        admissions.append(admission)
    return admissions


def _running(scheduler: Scheduler) -> list[int]:
    return [row.sample_id for row in scheduler.rows]


def test_prompts_enter_together_and_know_their_columns() -> None:
    scheduler = _scheduler()
    scheduler.add([_request(0, n=2, prompt=3, new=4), _request(10, n=1, prompt=5, new=2)])
    (admission,) = _admit_all(scheduler)
    assert admission.prompts == ((0, 1, 2), (0, 1, 2, 3, 4))
    assert admission.num_rows == (2, 1)
    facts = [(row.sample_id, row.start, row.first, row.last) for row in admission.rows]
    assert facts == [(0, -3, 0, 3), (1, -3, 0, 3), (10, -5, 0, 1)]
    assert (scheduler.oldest_column, scheduler.last_column) == (-5, 3)


def test_prefill_passes_respect_the_token_budget_but_a_long_prompt_passes_alone() -> None:
    scheduler = _scheduler(prefill=7)
    scheduler.add([_request(10 * i, n=1, prompt=p) for i, p in enumerate((3, 4, 9, 2))])
    assert [len(admission.prompts) for admission in _admit_all(scheduler)] == [2, 1, 1]


def test_samples_beyond_the_rows_follow_from_the_same_prefill() -> None:
    scheduler = _scheduler(sequences=3)
    scheduler.add([_request(0, n=5), _request(10, n=1)])
    (first,) = _admit_all(scheduler)
    assert (first.prompts, first.num_rows, scheduler.prefilled_head) == ((PROMPT,), (3,), PROMPT)
    assert scheduler.admit() is None
    scheduler.remove([0, 2])
    second = scheduler.admit()
    assert second is not None
    assert (second.prompts, second.num_rows, scheduler.prefilled_head) == ((), (2,), None)
    assert _running(scheduler) == [1, 3, 4]
    scheduler.remove([0, 1, 2])
    (third,) = _admit_all(scheduler)
    assert (len(third.prompts), _running(scheduler)) == (1, [10])


def test_a_new_weights_version_tags_later_rows_and_the_head_stays_with_its_rows() -> None:
    scheduler = _scheduler(sequences=2)
    scheduler.add([_request(0, n=3)])
    _admit_all(scheduler)
    assert scheduler.set_weights_version(4)
    assert not scheduler.set_weights_version(4)
    assert scheduler.rows_by_prompt() == {PROMPT: [0, 1]}
    scheduler.remove([0, 1])
    assert scheduler.rows_by_prompt() == {PROMPT: []}  # one of its samples waits
    (admission,) = _admit_all(scheduler)
    assert (admission.prompts, scheduler.prefilled_head) == ((), None)
    assert admission.rows[0].weights_version == 4


def test_rows_are_given_out_in_lots_unless_fewer_wait() -> None:
    scheduler = _scheduler(sequences=16)
    scheduler.add([_request(0, n=16), _request(100, n=6)])
    _admit_all(scheduler)
    scheduler.remove([3, 5, 7])
    assert scheduler.admit() is None
    scheduler.remove([6])
    assert scheduler.admit() is not None
    scheduler.remove([0])
    assert scheduler.admit() is None
    scheduler.remove([0])
    assert scheduler.admit() is not None  # the last two that wait


def test_the_cache_bound_counts_rows_times_the_longest_sequence() -> None:
    scheduler = _scheduler(cache=40)
    scheduler.add([_request(0, n=4, prompt=3, new=5), _request(10, n=4, prompt=6, new=4)])
    assert [admission.num_rows for admission in _admit_all(scheduler)] == [(4,)]
    assert scheduler.wanted_rows == 5
    scheduler.remove([0])
    assert scheduler.admit() is not None  # a fourth row of length 10 fits in 40
    assert _running(scheduler) == [3, 1, 2, 10]


def test_one_sequence_longer_than_the_cache_bound_still_runs() -> None:
    scheduler = _scheduler(cache=5)
    scheduler.add([_request(0, n=2, prompt=30, new=5)])
    assert [admission.num_rows for admission in _admit_all(scheduler)] == [(1,)]


def test_sequences_end_at_their_limit_or_when_they_stop() -> None:
    scheduler = _scheduler()
    scheduler.add([_request(0, n=1, new=2), _request(1, n=2, new=3)])
    _admit_all(scheduler)
    assert scheduler.ended([]) == []
    assert scheduler.ended([2]) == [2]
    scheduler.tick()
    assert scheduler.ended([2]) == [0, 2]


def test_gaps_are_filled_from_the_end() -> None:
    scheduler = _scheduler()
    scheduler.add([_request(0, n=6)])
    _admit_all(scheduler)
    removal = scheduler.remove([1, 3, 5])
    assert [row.sample_id for row in removal.rows] == [1, 3, 5]
    assert (removal.sources, removal.targets) == ((4,), (1,))
    assert _running(scheduler) == [0, 4, 2]


def test_distinct_rules_are_those_of_running_rows() -> None:
    scheduler = _scheduler()
    greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=4)
    scheduler.add([_request(0), GenerationRequest((9,), (1, 2), greedy)])
    _admit_all(scheduler)
    assert len(scheduler.rules) == 2
    scheduler.remove([2])
    assert len(scheduler.rules) == 1
    scheduler.remove([0, 1])
    assert (scheduler.rules, scheduler.has_work) == ((), False)


def test_end_tokens_matter_while_a_row_that_heeds_them_runs() -> None:
    scheduler = _scheduler()
    endless = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, ignore_eos=True
    )
    scheduler.add([GenerationRequest((0, 1), (5,), endless)])
    _admit_all(scheduler)
    assert not scheduler.stops_at_eos
    scheduler.add([_request(10, n=1)])
    _admit_all(scheduler)
    assert scheduler.stops_at_eos
    scheduler.remove([0])
    assert scheduler.stops_at_eos
    scheduler.remove([1 if _running(scheduler)[1] == 10 else 0])
    assert not scheduler.stops_at_eos


def test_further_turns_enter_before_new_prompts_and_behind_a_prefilled_head() -> None:
    scheduler = _scheduler(sequences=4)
    scheduler.add([_request(0, n=6), _request(10)])
    assert len(_admit_all(scheduler)) == 1, "two samples of the first prompt wait for rows"
    turns = [replace(_request(first, n=1), first_index=1) for first in (20, 21)]
    scheduler.add([_request(30, n=1), turns[0]])
    scheduler.add([turns[1]])
    order: list[int] = []
    while scheduler.has_work:
        scheduler.remove(range(len(scheduler.rows)))
        before = len(scheduler.rows)
        _admit_all(scheduler)
        order += _running(scheduler)[before:]
    assert order == [4, 5, 20, 21, 10, 11, 30]
