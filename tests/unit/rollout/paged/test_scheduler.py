# SPDX-License-Identifier: Apache-2.0
"""The paged scheduler as arithmetic: who enters when, who owns which page, who has to leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest

from tandem.errors import UserError
from tandem.rollout.paged.cache import PAGE_TOKENS, TailCopy
from tandem.rollout.paged.scheduler import Entry, PagedScheduler, Run, Running
from tandem.rollout.settings import Limits
from tandem.types import GenerationRequest, SamplingParams

PAGE = 4
"""Tokens of a page in the simulations: short sequences cross many borders."""
WINDOW = 3
"""Tokens of a window in the simulations."""
PLENTY = Limits(max_rows=1000, max_prefill_tokens=10_000)


def _scheduler(limits: Limits, num_pages: int) -> PagedScheduler:
    return PagedScheduler(limits, num_pages, window_tokens=8)


def _request(
    first_id: int, *, n: int = 2, prompt: int = 3, new: int = 4, first_token: int = 0
) -> GenerationRequest:
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=new)
    prompt_ids = tuple(range(first_token, first_token + prompt))
    return GenerationRequest(tuple(range(first_id, first_id + n)), prompt_ids, sampling)


def _ids(rows: Sequence[Running]) -> list[int]:
    return [row.sample_id for row in rows]


def _entered(entries: Sequence[Entry]) -> list[list[int]]:
    return [_ids(entry.sequences) for entry in entries]


def test_further_turns_enter_before_new_prompts() -> None:
    scheduler = _scheduler(PLENTY, 100)
    turns = [replace(_request(first, n=1), first_index=1) for first in (20, 21)]
    scheduler.add([_request(0, n=2), turns[0]])
    scheduler.add([_request(10, n=1), turns[1]])
    assert _entered(scheduler.admit()) == [[20], [21], [0, 1], [10]]


def test_prompts_enter_in_order_and_their_samples_together() -> None:
    scheduler = _scheduler(PLENTY, 100)
    scheduler.add([_request(0, n=3), _request(10, n=1), _request(20)])
    assert _entered(scheduler.admit()) == [[0, 1, 2], [10], [20, 21]]
    assert _ids(scheduler.rows) == [0, 1, 2, 10, 20, 21]
    assert scheduler.admit() == []


def test_samples_share_full_pages_and_own_the_one_filled_in_part() -> None:
    scheduler = _scheduler(PLENTY, 100)
    lengths = (2 * PAGE_TOKENS + 5, 2 * PAGE_TOKENS, 5)
    scheduler.add([_request(10 * i, n=3, prompt=prompt) for i, prompt in enumerate(lengths)])
    in_part, full, short = scheduler.admit()
    for entry, num_shared in ((in_part, 2), (full, 2), (short, 0)):
        pages = [sequence.pages for sequence in entry.sequences]
        assert len({tuple(own[:num_shared]) for own in pages}) == 1
        own_pages = [page for own in pages for page in own[num_shared:]]
        assert len(own_pages) == len(set(own_pages)) == 3
    first, *others = in_part.sequences
    source = first.pages[2]
    assert in_part.tail_copies == tuple(TailCopy(source, own.pages[2], 5) for own in others)
    assert full.tail_copies == ()  # nothing is filled in part
    assert len(short.tail_copies) == 2


def test_samples_that_enter_later_share_the_prompt_of_those_that_run() -> None:
    scheduler = _scheduler(Limits(2, max_prefill_tokens=1000), 100)
    scheduler.add([_request(0, n=4, prompt=PAGE_TOKENS + 5)])
    scheduler.admit()
    first, second = scheduler.rows
    scheduler.remove([second])
    (entry,) = scheduler.admit()
    third = entry.sequences[0]
    assert third.pages[0] == first.pages[0] and third.pages[1] != first.pages[1]
    # Its last token alone is computed, for the logits; the rest of the last page is copied.
    assert entry.run == Run(
        (PAGE_TOKENS + 4,), PAGE_TOKENS + 4, tuple(third.pages), tuple(first.pages)
    )
    assert entry.tail_copies == (TailCopy(first.pages[1], third.pages[1], 5),)
    scheduler.remove(scheduler.rows)
    (entry,) = scheduler.admit()
    assert (entry.run.start, len(entry.run.token_ids)) == (0, PAGE_TOKENS + 5)  # nobody has it
    scheduler.remove(scheduler.rows)
    assert scheduler._pool.num_free == 100


def test_a_prompt_is_computed_again_once_and_responses_behind_it_without_their_newest() -> None:
    scheduler = _scheduler(Limits(1000, max_prefill_tokens=170), 100)
    scheduler.add([_request(0, n=3, prompt=100, new=99), _request(10, n=2, prompt=64, new=99)])
    while scheduler.admit():
        pass
    for row, length in zip(scheduler.rows, (60, 1, 70, 50, 2), strict=True):
        row.token_ids += range(length)
    passes = scheduler.recompute()
    computed = [
        [(entry.sequences[0].sample_id, len(entry.run.token_ids)) for entry in entries]
        for entries in passes
    ]
    # 49 + 69 + 59 are more than 170; 1 token counts as a quarter of the 65 keys it attends to.
    assert computed == [[(0, 100), (10, 64)], [(0, 59), (2, 69)], [(10, 49), (11, 1)]]
    (first, second), *_ = passes
    assert [_ids(entry.sequences) for entry in (first, second)] == [[0, 1, 2], [10, 11]]
    assert [copy.num_tokens for copy in first.tail_copies] == [36, 36]
    assert second.tail_copies == ()  # the prompt fills its page
    assert {entry.run.start for entry in passes[1]} == {100}


def test_the_prefill_budget_holds_but_a_long_prompt_passes_alone() -> None:
    scheduler = _scheduler(Limits(1000, max_prefill_tokens=7), 100)
    scheduler.add([_request(10 * i, n=1, prompt=p) for i, p in enumerate((3, 4, 9, 2))])
    assert [_entered(scheduler.admit()) for _ in range(4)] == [[[0], [10]], [[20]], [[30]], []]


def test_what_is_left_of_a_group_larger_than_the_room_enters_later() -> None:
    scheduler = _scheduler(Limits(3, max_prefill_tokens=1000), 100)
    scheduler.add([_request(0, n=5), _request(10, n=1)])
    assert _entered(scheduler.admit()) == [[0, 1, 2]]
    assert scheduler.admit() == []
    scheduler.remove([scheduler.rows[0], scheduler.rows[2]])
    assert _entered(scheduler.admit()) == [[3, 4]]
    assert _ids(scheduler.rows) == [1, 3, 4]
    scheduler.remove(scheduler.rows)
    assert _entered(scheduler.admit()) == [[10]]


def test_rows_are_given_out_in_lots_of_a_sixteenth() -> None:
    scheduler = _scheduler(Limits(32, max_prefill_tokens=1000), 100)
    scheduler.add([_request(0, n=32), _request(100, n=3)])
    scheduler.admit()
    scheduler.remove(scheduler.rows[:1])
    assert scheduler.admit() == []
    scheduler.remove(scheduler.rows[:1])
    assert _entered(scheduler.admit()) == [[100, 101]]
    scheduler.remove(scheduler.rows[:1])
    assert _entered(scheduler.admit()) == [[102]]  # fewer wait than a lot has


def test_without_pages_for_all_some_samples_wait() -> None:
    scheduler = _scheduler(PLENTY, 5)
    scheduler.add([_request(0, n=8, prompt=PAGE_TOKENS + 1, new=8)])
    assert _entered(scheduler.admit()) == [[0, 1, 2, 3]]
    assert scheduler._pool.num_free == 0
    assert scheduler.admit() == []
    scheduler.remove(scheduler.rows)
    assert scheduler._pool.num_free == 5


def test_a_page_stays_free_for_each_row_that_runs() -> None:
    scheduler = _scheduler(PLENTY, 8)
    scheduler.add([_request(0, n=3)])
    scheduler.admit()
    scheduler.add([_request(10, n=9)])
    assert _entered(scheduler.admit()) == [[10, 11]]
    assert scheduler._pool.num_free == 3


def test_a_sequence_that_fills_the_cache_is_held_and_a_longer_one_refused() -> None:
    scheduler = _scheduler(PLENTY, 3)
    prompt, new = 3 * PAGE_TOKENS - 4, 4
    with pytest.raises(UserError, match=rf"={prompt + new + 1}: .* holds {3 * PAGE_TOKENS} tokens"):
        scheduler.add([_request(0, prompt=prompt, new=new + 1)])
    assert not scheduler.has_work
    scheduler.add([_request(0, n=2, prompt=prompt, new=new)])
    assert scheduler.wanted_pages == scheduler.longest_pages == 3
    assert _entered(scheduler.admit()) == [[0]]


def test_the_newest_leaves_when_pages_run_out_and_comes_back_with_its_tokens() -> None:
    scheduler = _scheduler(PLENTY, 5)
    scheduler.add([_request(0, n=2, prompt=PAGE_TOKENS - 2, new=PAGE_TOKENS + 9)])
    scheduler.admit()
    older, newer = scheduler.rows
    for row in (older, newer):
        assert len(row.pages) == 2
        row.token_ids += range(PAGE_TOKENS + 3)
    assert not scheduler.has_window()
    scheduler.reserve_window()
    assert (_ids(scheduler.rows), scheduler.num_preempted) == ([0], 1)
    assert (len(older.pages), newer.pages) == (3, [])
    scheduler.add([_request(10, n=1)])
    assert scheduler.admit() == []
    scheduler.remove([older])
    entry, later = scheduler.admit()
    assert (entry.sequences, _ids(later.sequences)) == ((newer,), [10])
    assert entry.run.token_ids == (*newer.prompt_ids, *newer.token_ids)


def test_nothing_under_way_may_be_preempted() -> None:
    scheduler = _scheduler(PLENTY, 2)
    scheduler.add([_request(0, n=2, prompt=PAGE_TOKENS - 9, new=20)])
    scheduler.admit()
    for row in scheduler.rows:
        row.num_launched = 9
    assert not scheduler.has_window()
    with pytest.raises(AssertionError, match="has unread steps"):
        scheduler.reserve_window()


def test_wanted_pages_suffice_when_a_group_enters_in_parts() -> None:
    limits = Limits(2, max_prefill_tokens=1000)
    scheduler = _scheduler(limits, 100)
    scheduler.add([_request(0, n=1, prompt=3), _request(10, n=2, prompt=10 * PAGE_TOKENS)])
    scheduler.admit()
    scheduler.remove(scheduler.rows[:1])
    scheduler.admit()
    given = {page for row in scheduler.rows for page in row.pages}
    assert max(given) < scheduler.wanted_pages


@dataclass
class Simulation:
    """The engine's way with a scheduler, on a memory that knows who wrote what.

    A window is launched before the last one is read; now and then the weights change. ``lengths``:
    after how many tokens a sample really ends, which the scheduler learns a window late.
    ``memory``: (page, offset) to the prompt or the sample that wrote it, the position, and the
    version of the weights. ``turns``: how many further turns a sample has, each a little later.
    """

    scheduler: PagedScheduler
    limits: Limits
    lengths: dict[int, int]
    switches: Callable[[], bool]
    num_pages: int = 0
    version: int = 0
    is_outdated: bool = False
    drawn: dict[int, int] = field(default_factory=dict[int, int])
    finished: list[int] = field(default_factory=list[int])
    turns: dict[int, int] = field(default_factory=dict[int, int])
    first_prompts: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    tools: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    memory: dict[tuple[int, int], tuple[object, int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[object, int, int]]
    )

    def run(self, arrivals: Iterator[GenerationRequest]) -> None:
        """Until nothing is left to do; now and then new requests arrive."""
        flight: list[tuple[Running, int, int]] | None = None
        self.scheduler.add([next(arrivals)])
        self.num_pages = self.scheduler._pool.num_free + len(self._owned())
        while self.scheduler.has_work or self.tools:
            if len(self.tools) > 3 or (self.tools and not self.scheduler.has_work):
                self._answer(self.tools.pop(0))
            if self.switches():
                self._read(flight or [])
                self.scheduler.parking.clear()
                flight, self.is_outdated = None, True
                self.version += 1
                continue
            last = flight
            flight = self._launch(under_way=last is not None)
            if last is not None:
                self._read(last)
            assert flight or last or self.tools, (
                "neither a window nor anything to read: it would never end"
            )
            self._check_pages()
            new = next(arrivals, None)
            self.scheduler.add([] if new is None else [new])
            self.num_pages = self.scheduler._pool.num_free + len(self._owned())

    def _answer(self, request: GenerationRequest) -> None:
        """A tool has answered: the sample's next turn begins."""
        (sample_id,) = request.sample_ids
        self.drawn[sample_id] = 0
        self.scheduler.add([request])

    def _end_turn(self, row: Running) -> None:
        """Ask for the sample's next turn, which the tool's answer of two tokens precedes."""
        left = self.turns.get(row.sample_id, 0)
        if left == 0:
            self.scheduler.parking.forget((row.sample_id,))
            return
        self.turns[row.sample_id] = left - 1
        ids = (*row.prompt_ids, *row.token_ids, 0, 0)
        sampling = replace(row.sampling, max_new_tokens=self.lengths[row.sample_id])
        index = row.first_index + len(row.token_ids) + 2
        self.tools.append(
            GenerationRequest((row.sample_id,), ids, sampling, first_index=index, continues=True)
        )

    def _launch(self, *, under_way: bool) -> list[tuple[Running, int, int]] | None:
        scheduler, window = self.scheduler, WINDOW
        if under_way and not scheduler.has_window():
            return None
        scheduler.reserve_window()
        kept = len(scheduler.rows)
        outdated = scheduler.recompute() if self.is_outdated else []
        entries = scheduler.admit()
        for again in outdated:
            self._fill(again)
        self.is_outdated = False
        self._fill(entries)
        for row in scheduler.rows[:kept]:
            self._check_context(row, row.num_tokens - row.num_launched - 1)
        for row in scheduler.rows[kept:]:
            assert len(row.token_ids) == self.drawn.setdefault(row.sample_id, 0), "lost tokens"
            self._check_context(row, row.num_tokens)
        flight: list[tuple[Running, int, int]] = []
        wanted = [row.num_remaining - (i >= kept) for i, row in enumerate(scheduler.rows)]
        num_steps = min(window, max(wanted, default=0))
        if num_steps <= 0 and kept == len(scheduler.rows):
            return None
        for i, row in enumerate(scheduler.rows):
            enters = i >= kept
            launched = min(num_steps + enters, row.num_remaining)
            left = self.lengths[row.sample_id] - self.drawn[row.sample_id]
            count = max(0, min(launched, left))
            self.drawn[row.sample_id] += enters
            self._decode(row, count - enters)
            self.drawn[row.sample_id] += count - enters
            row.num_launched += launched
            flight.append((row, launched, count))
        return flight

    def _fill(self, entries: Sequence[Entry]) -> None:
        """A pass: all runs are stored, then they read what is before them, then tails are copied.
        Runs are of tokens that are known, at their positions."""
        for entry in entries:
            row, run = entry.sequences[0], entry.run
            context = (*row.prompt_ids, *row.token_ids)
            assert context[run.start :][: len(run.token_ids)] == run.token_ids
            for position in range(run.start, run.start + len(run.token_ids)):
                self._write(row, run.pages, position=position)
        for entry in entries:
            self._check(entry.sequences[0], entry.run.prefix_pages, length=entry.run.start)
        for copy in (copy for entry in entries for copy in entry.tail_copies):
            for offset in range(copy.num_tokens):
                self.memory[copy.target, offset] = self.memory[copy.source, offset]

    def _decode(self, row: Running, num_steps: int) -> None:
        """Each step stores the newest token's key and reads all before it."""
        start = len(row.prompt_ids) + self.drawn[row.sample_id] - 1
        for position in range(start, start + num_steps):
            self._write(row, row.pages, position=position)
        if num_steps > 0:
            self._check_context(row, start + num_steps)

    def _write(self, row: Running, pages: Sequence[int], *, position: int) -> None:
        place = (pages[position // PAGE], position % PAGE)
        self.memory[place] = (self._author(row, position), position, self.version)

    def _author(self, row: Running, position: int) -> object:
        prompt = self.first_prompts.setdefault(row.sample_id, row.prompt_ids)
        return prompt if position < len(prompt) else row.sample_id

    def _check_context(self, row: Running, length: int) -> None:
        self._check(row, row.pages, length=length)

    def _check(self, row: Running, pages: Sequence[int], *, length: int) -> None:
        for position in range(length):
            found = self.memory[pages[position // PAGE], position % PAGE]
            expected = (self._author(row, position), position, self.version)
            assert found == expected, "another's key is read"

    def _read(self, flight: list[tuple[Running, int, int]]) -> None:
        ended: list[Running] = []
        for row, launched, count in flight:
            row.num_launched -= launched
            if row.pages:
                row.token_ids += [0] * count
                ended += [row] if len(row.token_ids) == self.lengths[row.sample_id] else []
        self.finished += _ids(ended)
        self.scheduler.remove(ended)
        for row in ended:
            self._end_turn(row)

    def _check_pages(self) -> None:
        scheduler, owned = self.scheduler, self._owned()
        assert scheduler._pool.num_free == self.num_pages - len(owned)
        assert len(scheduler.rows) <= self.limits.max_rows
        assert max(owned, default=-1) < scheduler.wanted_pages

    def _owned(self) -> set[int]:
        parked = self.scheduler.parking._parked.values()
        return {page for one in (*self.scheduler.rows, *parked) for page in one.pages}


@pytest.mark.parametrize(
    ("num_pages", "max_rows", "seed"), [(10, 6, 0), (14, 20, 1), (40, 6, 2), (200, 8, 3)]
)
def test_a_long_time_loses_nothing_and_mixes_nothing_up(
    num_pages: int, max_rows: int, seed: int
) -> None:
    rng = random.Random(seed)
    limits = Limits(max_rows, max_prefill_tokens=30)
    requests = [
        _request(
            100 * i,
            n=rng.randint(1, 9),
            prompt=rng.randint(1, 17),
            new=rng.randint(1, 20),
            first_token=1000 * i,
        )
        for i in range(200)
    ]
    lengths = {
        sample_id: rng.randint(1, request.sampling.max_new_tokens)
        for request in requests
        for sample_id in request.sample_ids
    }
    scheduler = PagedScheduler(limits, num_pages, window_tokens=WINDOW, page_tokens=PAGE)
    simulation = Simulation(scheduler, limits, lengths, switches=lambda: rng.random() < 0.1)
    for start in range(0, len(requests), 40):
        simulation.run(iter(requests[start : start + 40]))
    assert sorted(simulation.finished) == sorted(lengths)
    assert simulation.drawn == lengths
    assert scheduler._pool.num_free == simulation.num_pages == num_pages
    assert scheduler.num_preempted > 0 or num_pages > 20
    assert simulation.version > 20


@pytest.mark.parametrize(
    ("num_pages", "max_rows", "seed"), [(24, 6, 0), (40, 20, 1), (80, 6, 2), (2000, 8, 3)]
)
def test_m22_parked_pages_are_read_by_their_sample_alone_and_give_way_to_rows(
    num_pages: int, max_rows: int, seed: int
) -> None:
    """Samples have up to three further turns, some of which go on in their parked pages."""
    rng = random.Random(seed)
    limits = Limits(max_rows, max_prefill_tokens=30)
    requests = [
        replace(
            _request(
                100 * i,
                n=rng.randint(1, 4),
                prompt=rng.randint(1, 17),
                new=rng.randint(1, 12),
                first_token=1000 * i,
            ),
            continues=True,
        )
        for i in range(60)
    ]
    samples = {sample_id: request for request in requests for sample_id in request.sample_ids}
    lengths = {
        sample_id: rng.randint(1, request.sampling.max_new_tokens)
        for sample_id, request in samples.items()
    }
    turns = {sample_id: rng.randint(0, 3) for sample_id in lengths}
    scheduler = PagedScheduler(limits, num_pages, window_tokens=WINDOW, page_tokens=PAGE)
    simulation = Simulation(
        scheduler, limits, lengths, switches=lambda: rng.random() < 0.05, turns=dict(turns)
    )
    simulation.run(iter(requests))
    assert len(simulation.finished) == sum(1 + number for number in turns.values())
    assert scheduler._pool.num_free == num_pages, "a page is lost"
    assert scheduler.parking.num_reused > 0
    assert (scheduler.parking.num_evicted > 40) == (num_pages < 100)


def test_m22_the_pages_that_have_waited_longest_give_way_before_a_row_does() -> None:
    scheduler = PagedScheduler(PLENTY, 10, window_tokens=WINDOW, page_tokens=PAGE)
    scheduler.add([replace(_request(first, n=1, prompt=7), continues=True) for first in (0, 1)])
    scheduler.admit()
    for row in scheduler.rows[:]:
        row.token_ids += [9, 9]
        scheduler.remove([row])
    assert scheduler.parking.find(0, (*range(7), 9, 5)) is not None, "the newest has no key yet"
    assert scheduler.parking.find(0, (*range(6), 5, 9, 5)) is None, "its history was rewritten"
    scheduler.add([_request(2, n=1, prompt=24, new=8)])
    assert _entered(scheduler.admit()) == [[2]]
    scheduler.reserve_window()
    assert (len(scheduler.parking), scheduler.num_preempted) == (1, 0)
    assert scheduler.parking.find(1, (*range(7), 9, 5)) is not None
    further = GenerationRequest((1,), (*range(7), 9, 9, 5), _request(0).sampling, first_index=3)
    scheduler.add([further])
    scheduler.remove(scheduler.rows)
    (entry,) = scheduler.admit()
    assert (entry.run.token_ids, entry.run.start, len(scheduler.parking)) == ((9, 5), 8, 0)


def test_wanted_pages_grow_seldom_although_requests_come_one_by_one() -> None:
    """Each growth costs all that pages hold."""
    rng = random.Random(0)
    scheduler = _scheduler(Limits(64, max_prefill_tokens=10_000), 100_000)
    wanted: list[int] = []
    for number in range(400):
        request = _request(8 * number, n=8, prompt=rng.randint(50, 1000), new=512)
        scheduler.add([request])
        wanted.append(scheduler.wanted_pages)
        scheduler.admit()
        if len(scheduler.rows) > 48:
            scheduler.remove(rng.sample(scheduler.rows, 16))
    assert len(set(wanted)) <= 10
    assert wanted[-1] <= 64 * scheduler.longest_pages
