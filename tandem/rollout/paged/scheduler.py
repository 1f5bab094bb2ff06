# SPDX-License-Identifier: Apache-2.0
"""The queue, the running sequences, and the pages that they own. Integers only; no device.

A sequence waits, runs and finishes. Waiting ones enter in order as soon as there are rows and pages
for them. When pages run out, the newest running one is preempted: it returns to the head of the
queue with its tokens, and its pages are recomputed later. The running samples of a prompt share its
full pages, whenever they entered. Each owns a copy of the page that the prompt fills in part. The
prompt is computed only for the first of them. A sample that may continue leaves its pages parked
(``parking.py``); they give way to whatever runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tandem.errors import UserError
from tandem.pictures import Picture
from tandem.rollout.order import put_behind_older
from tandem.rollout.packing import cost_of, in_passes
from tandem.rollout.paged.cache import PAGE_TOKENS, TailCopy
from tandem.rollout.paged.pages import PagePool
from tandem.rollout.paged.parking import Parked, Parking
from tandem.rollout.recording import SampleRoutes, SharedRoutes
from tandem.rollout.settings import Limits
from tandem.types import GenerationRequest, SamplingParams, TokenIds


@dataclass(slots=True, eq=False)
class Running:
    """A sample that waits or runs.

    Attributes:
        page_tokens: tokens of a page.
        token_ids, log_probs: the tokens that the host has read.
        num_launched: further tokens that launched steps may have drawn.
        pages: the pages that it owns, in order.
        num_common_pages: how many of its first pages other samples of its prompt may have, too.
        holders: the samples of its prompt that own pages; one list for all of them.
        version_starts: (index, version) of the first token that each version drew.
        routes: the experts of its tokens, as far as the host has read them.
        first_index, continues, pictures: as in ``GenerationRequest``. A sample with pictures
            leaves no pages for further turns.
    """

    sample_id: int
    prompt_ids: TokenIds
    sampling: SamplingParams
    page_tokens: int
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    num_launched: int = 0
    pages: list[int] = field(default_factory=list[int])
    num_common_pages: int = 0
    holders: list[Running] = field(default_factory=list["Running"], repr=False)
    version_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    routes: SampleRoutes = field(default_factory=SampleRoutes, repr=False)
    first_index: int = 0
    continues: bool = False
    pictures: tuple[Picture, ...] = ()

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be drawn after the launched steps."""
        return self.sampling.max_new_tokens - len(self.token_ids) - self.num_launched

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response after the launched steps."""
        return len(self.prompt_ids) + len(self.token_ids) + self.num_launched

    @property
    def num_shared_pages(self) -> int:
        """Pages that its prompt fills."""
        return len(self.prompt_ids) // self.page_tokens

    @property
    def last_common_page(self) -> int:
        """The last of the pages that others may have, too; -1 if there are none.

        A page has one place in one prompt. Samples with the same one have all pages before it in
        common.
        """
        return self.pages[self.num_common_pages - 1] if self.num_common_pages else -1

    @property
    def most_pages(self) -> int:
        """Pages that it owns at its greatest length."""
        return -(-(len(self.prompt_ids) + self.sampling.max_new_tokens) // self.page_tokens)

    def extend(self, token_ids: list[int], log_probs: list[float], *, version: int) -> None:
        """Append tokens that ``version`` has drawn."""
        if token_ids and (not self.version_starts or self.version_starts[-1][1] != version):
            self.version_starts.append((len(self.token_ids), version))
        self.token_ids += token_ids
        self.log_probs += log_probs


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of a sequence that a prefill pass computes, from position ``start`` on.

    Attributes:
        pages: the pages of the whole sequence, which take their keys.
        prefix_pages: the pages of positions 0..start-1. They are already filled, or a run of the
            same pass that begins at 0 fills them.
        pictures: the pictures of the sequence. None of them has tokens both before and in a run.
    """

    token_ids: TokenIds
    start: int
    pages: tuple[int, ...]
    prefix_pages: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def cost(self) -> int:
        """The cost in tokens of a pass."""
        return cost_of(len(self.token_ids), self.start)


@dataclass(frozen=True, slots=True)
class Entry:
    """A run, the sequences that it ends in, and the copies to make once it is stored."""

    run: Run
    sequences: tuple[Running, ...]
    tail_copies: tuple[TailCopy, ...] = ()


class PagedScheduler:
    """The queue, the rows and their pages. Callers only read the attributes.

    Args:
        num_pages: pages of the cache.
        window_tokens: tokens that a row may gain between two reads by the host.
        page_tokens: tokens of a page.
        keeps_turns: whether samples that wait for another turn keep their pages.

    Attributes:
        rows: the running sequences, in the order of the device's rows.
        parking: the pages of samples that wait for another turn.
        num_preempted: the number of preemptions.
        wanted_pages: the number of pages to allocate: at least as many as all sequences so far can
            own at once, within the limits, and those that are parked. It grows in large steps,
            because growing recomputes all pages. No page of a higher number is used.
        longest_pages: pages of the longest sequence so far.
    """

    def __init__(
        self,
        limits: Limits,
        num_pages: int,
        *,
        window_tokens: int,
        page_tokens: int = PAGE_TOKENS,
        keeps_turns: bool = True,
    ) -> None:
        self._limits = limits
        self._keeps_turns = keeps_turns
        self._num_pages = num_pages
        self._window_tokens = window_tokens
        self._page_tokens = page_tokens
        self._pool = PagePool(num_pages)
        self.parking = Parking(self._pool)
        self._waiting: deque[tuple[Running, ...]] = deque()
        self.rows: list[Running] = []
        self.num_preempted = 0
        self.wanted_pages = 0
        self.longest_pages = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits."""
        return bool(self.rows or self._waiting)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue; further turns come before new prompts.

        Raises:
            UserError: a sequence does not fit into the cache, even alone.
        """
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            if self._pages_for(longest) > self._num_pages:
                raise UserError(
                    "data.max_prompt_length + data.max_response_length",
                    longest,
                    rule=f"the key/value cache holds {self._num_pages * self._page_tokens} tokens",
                    remedy="Raise actor_rollout_ref.rollout.gpu_memory_utilization or shorten the "
                    "sequences.",
                )
            self.longest_pages = max(self.longest_pages, self._pages_for(longest))
        further = [self._unit(request) for request in requests if request.first_index > 0]
        put_behind_older(self._waiting, further, is_older=_has_begun)
        self._waiting.extend(
            [self._unit(request) for request in requests if request.first_index == 0]
        )
        most = min(self._most_pages() + self.parking.num_pages, self._num_pages)
        if most > self.wanted_pages:
            of_rows = self._limits.max_rows * self.longest_pages
            bound = self._num_pages if len(self.parking) else min(of_rows, self._num_pages)
            self.wanted_pages = min(max(most, self.wanted_pages * 3 // 2), bound)

    def _unit(self, request: GenerationRequest) -> tuple[Running, ...]:
        """Return the waiting sequences of a request, which share their holders."""
        holders: list[Running] = []
        shared = SharedRoutes()
        return tuple(
            Running(
                sample_id,
                request.prompt_ids,
                request.sampling,
                self._page_tokens,
                holders=holders,
                routes=SampleRoutes(shared),
                first_index=request.first_index,
                continues=request.continues and not request.pictures,
                pictures=request.pictures,
            )
            for sample_id in request.sample_ids
        )

    def admit(self) -> list[Entry]:
        """Let waiting sequences enter within the rows, the pages and the prefill budget.

        They enter when a sixteenth of all rows is free, because entering has a fixed cost.
        """
        entries: list[Entry] = []
        num_waiting = sum(map(len, self._waiting))
        chunk = min(num_waiting, max(1, self._limits.max_rows // 16))
        if self.rows and self._limits.max_rows - len(self.rows) < chunk:
            return entries
        budget = self._limits.max_prefill_tokens
        while self._waiting:
            head = self._waiting[0]
            parked = self._parked_of(head)
            run = _next_run(head[0]) if parked is None else _further_run(head[0], parked)
            if entries and run.cost > budget:
                break
            entry = self._enter_head(run) if parked is None else self._enter_again(run)
            if entry is None:
                break
            entries.append(entry)
            budget -= run.cost
        return entries

    def recompute(self) -> list[list[Entry]]:
        """Return passes that recompute the pages of all rows.

        First comes each prompt, once for all its samples, then each response without its newest
        token, which the next step computes. The results of all launched steps must have been read.
        """
        groups: dict[int, list[Running]] = {}
        for row in self.rows:
            groups.setdefault(id(row.holders), []).append(row)
        prompts = [_prompt_again(group) for group in groups.values()]
        responses = [_response_again(row) for row in self.rows if len(row.token_ids) > 1]
        return [
            entries[chosen]
            for entries in (prompts, responses)
            for chosen in in_passes(
                [entry.run.cost for entry in entries], self._limits.max_prefill_tokens
            )
        ]

    def has_window(self) -> bool:
        """Return whether there are enough free pages for the next window of all rows, for which
        parked pages give way.
        """
        missing = sum(map(self._missing, self.rows))
        self._free_parked(missing)
        return missing <= self._pool.num_free

    def reserve_window(self) -> None:
        """Give each row the pages that its next window may fill.

        While there are too few, parked pages give way, and then the newest row is preempted. The
        results of all launched steps must then have been read.
        """
        self._free_parked(sum(map(self._missing, self.rows)))
        while sum(missing := list(map(self._missing, self.rows))) > self._pool.num_free:
            self._preempt_newest()
        for sequence, count in zip(self.rows, missing, strict=True):
            sequence.pages += self._pool.take(count)

    def remove(self, finished: Sequence[Running]) -> None:
        """Remove finished rows. Free the pages that they alone own, or keep them. The order of the
        others is kept.
        """
        leaving = set(map(id, finished))
        self.rows = [sequence for sequence in self.rows if id(sequence) not in leaving]
        for sequence in finished:
            if sequence.continues and self._keeps_turns:
                self._park(sequence)
            self._free(sequence)

    def _park(self, sequence: Running) -> None:
        """Keep the pages with keys. The newest token has none yet."""
        token_ids = (*sequence.prompt_ids, *sequence.token_ids)[:-1]
        num_pages = self._pages_for(len(token_ids))
        pages, sequence.pages = sequence.pages[:num_pages], sequence.pages[num_pages:]
        routes = sequence.routes.joined() if sequence.routes.num_tokens else None
        parked = Parked(token_ids, tuple(pages), sequence.num_common_pages, routes)
        self.parking.put(sequence.sample_id, parked)

    def _parked_of(self, unit: tuple[Running, ...]) -> Parked | None:
        """Return the pages from which waiting sequences can go on, if there are any."""
        first = unit[0]
        if first.first_index == 0 or len(unit) > 1 or first.token_ids:
            return None
        return self.parking.find(first.sample_id, first.prompt_ids)

    def _free_parked(self, num_pages: int, *, but: int = -1) -> None:
        """Let parked pages give way until ``num_pages`` are free among those that are allocated."""
        num_unallocated = self._num_pages - self.wanted_pages
        self.parking.give_way(num_pages + num_unallocated, but=but)

    def _most_pages(self) -> int:
        """Return a bound on the pages in use at any later time."""
        sequences = [*self.rows, *(sequence for unit in self._waiting for sequence in unit)]
        own = sum(sequence.most_pages - sequence.num_shared_pages for sequence in sequences)
        shared = {id(sequence.holders): sequence.num_shared_pages for sequence in sequences}
        most = own + sum(shared.values())
        return min(most, self._limits.max_rows * self.longest_pages, self._num_pages)

    def _enter_head(self, run: Run) -> Entry | None:
        """Admit as many samples of the head of the queue as there is room for."""
        head = self._waiting[0]
        first = head[0]
        num_shared = first.num_shared_pages
        missing = 0 if first.holders else num_shared
        own = self._pages_for(self._first_end(first)) - num_shared
        free_rows = self._limits.max_rows - len(self.rows)
        self._free_parked(missing + len(self.rows) + own * min(len(head), free_rows))
        spare = self._pool.num_free - missing - len(self.rows)
        count = min(len(head), free_rows, spare // max(1, own))
        if count <= 0 and not self.rows and own + missing <= self._pool.num_free:
            count = 1
        if count <= 0:
            return None
        self._waiting.popleft()
        if count < len(head):
            self._waiting.appendleft(head[count:])
        entering = head[:count]
        if first.holders:
            shared = first.holders[0].pages[:num_shared]
            self._pool.share(shared, owners=count)
        else:
            shared = self._pool.take(num_shared)
            self._pool.share(shared, owners=count - 1)
        for sequence in entering:
            sequence.pages = shared + self._pool.take(own)
            sequence.num_common_pages = num_shared
        first.holders += entering
        self.rows += entering
        run = replace(run, pages=tuple(first.pages))
        return Entry(run, entering, _tail_copies(first.holders[0], entering))

    def _enter_again(self, run: Run) -> Entry | None:
        """Admit the head of the queue, which goes on in its parked pages, if there is room."""
        (sequence,) = self._waiting[0]
        own = self._pages_for(self._first_end(sequence)) - len(run.prefix_pages)
        if len(self.rows) >= self._limits.max_rows:
            return None
        self._free_parked(own + len(self.rows), but=sequence.sample_id)
        if self._pool.num_free < own + len(self.rows):
            return None
        self._waiting.popleft()
        parked = self.parking.take(sequence.sample_id)
        sequence.routes.shared.routes_tLX = parked.routes_tLX
        sequence.pages = [*parked.pages, *self._pool.take(own)]
        sequence.num_common_pages = parked.num_common_pages
        sequence.holders.append(sequence)
        self.rows.append(sequence)
        return Entry(replace(run, pages=tuple(sequence.pages)), (sequence,))

    def _first_end(self, sequence: Running) -> int:
        """Return how many keys are stored after the first draw and the window that follows."""
        steps = min(self._window_tokens, sequence.num_remaining - 1)
        return sequence.num_tokens + steps

    def _missing(self, sequence: Running) -> int:
        """Return how many pages the sequence lacks for its next window."""
        # Plain arithmetic, because this runs for every row in every window.
        drawn = len(sequence.token_ids) + sequence.num_launched
        drawn = min(drawn + self._window_tokens, sequence.sampling.max_new_tokens)
        num_tokens = len(sequence.prompt_ids) - 1 + drawn
        return max(0, -(-num_tokens // self._page_tokens) - len(sequence.pages))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_tokens)

    def _preempt_newest(self) -> None:
        sequence = self.rows.pop()
        assert sequence.num_launched == 0, f"sample {sequence.sample_id} has unread steps"
        self._free(sequence)
        self._waiting.appendleft((sequence,))
        self.num_preempted += 1

    def _free(self, sequence: Running) -> None:
        """Release the pages of a row that it has left."""
        self._pool.release(sequence.pages)
        sequence.pages = []
        sequence.holders.remove(sequence)


def num_saved_pages(rows: Sequence[Running], *, rows_of_tile: int) -> int:
    """Return how many reads of pages tiles save. A tile has at most ``rows_of_tile`` rows and reads
    each of their common pages once.
    """
    counts = Counter(row.last_common_page for row in rows)
    lengths = {row.last_common_page: row.num_common_pages for row in rows}
    tiles = {page: -(-count // max(1, rows_of_tile)) for page, count in counts.items()}
    return sum((counts[page] - tiles[page]) * lengths[page] for page in counts)


def _has_begun(unit: tuple[Running, ...]) -> bool:
    """Return whether waiting sequences are a further turn, were put back, or lack rows only."""
    first = unit[0]
    return first.first_index > 0 or bool(first.token_ids or first.holders)


def _next_run(sequence: Running) -> Run:
    """Return the run after which the next token of a waiting sequence can be drawn."""
    prompt, response = sequence.prompt_ids, tuple(sequence.token_ids)
    pictures = sequence.pictures
    ends_in_picture = bool(pictures) and prompt[-1] in pictures[-1].token_ids
    if not sequence.holders or (ends_in_picture and not response):
        return Run((*prompt, *response), 0, (), pictures=pictures)
    # The last token of a cached prompt is recomputed for its logits. If it fills a page, its key
    # there is overwritten with one that differs only by rounding or by newer weights.
    run, start = (response, len(prompt)) if response else (prompt[-1:], len(prompt) - 1)
    return Run(run, start, (), _prompt_pages(sequence.holders[0]), pictures)


def _further_run(sequence: Running, parked: Parked) -> Run:
    """Return the run of the tokens that are not in the parked pages."""
    num_kept = len(parked.token_ids)
    return Run(sequence.prompt_ids[num_kept:], num_kept, (), parked.pages)


def _prompt_again(group: Sequence[Running]) -> Entry:
    first = group[0]
    run = Run(first.prompt_ids, 0, tuple(first.pages), pictures=first.pictures)
    return Entry(run, tuple(group), _tail_copies(first, group))


def _response_again(row: Running) -> Entry:
    run = tuple(row.token_ids[:-1])
    start = len(row.prompt_ids)
    prefix_pages = _prompt_pages(row.holders[0])
    return Entry(Run(run, start, tuple(row.pages), prefix_pages, row.pictures), (row,))


def _prompt_pages(sequence: Running) -> tuple[int, ...]:
    return tuple(sequence.pages[: -(-len(sequence.prompt_ids) // sequence.page_tokens)])


def _tail_copies(source: Running, sequences: Sequence[Running]) -> tuple[TailCopy, ...]:
    """Return copies of the page that the prompt fills in part from ``source`` to the others."""
    num_full, num_tokens = divmod(len(source.prompt_ids), source.page_tokens)
    if num_tokens == 0:
        return ()
    return tuple(
        TailCopy(source.pages[num_full], sequence.pages[num_full], num_tokens)
        for sequence in sequences
        if sequence is not source
    )
