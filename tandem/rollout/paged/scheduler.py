# SPDX-License-Identifier: Apache-2.0
"""Which sequences run, which wait, and which pages they own. Integers only; no device.

A sequence waits, runs and finishes. Waiting ones enter in order as soon as there are rows and pages
for them; when pages run out, the newest running one goes back to the head of the queue with the
tokens it has, to be prefilled again. The samples of a prompt that enter together share its full
pages; the page that the prompt fills in part is each one's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.errors import UserError
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.pages import PagePool
from tandem.types import GenerationRequest, SamplingParams, TokenIds


@dataclass(slots=True, eq=False)
class Running:
    """One sample on its way.

    Attributes:
        token_ids, log_probs: as far as the host has read them.
        num_launched: tokens beyond those that steps under way may have drawn.
        pages: what it owns, in order.
        version_starts: (index, version) of the first token that each version drew.
    """

    sample_id: int
    prompt_ids: TokenIds
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    num_launched: int = 0
    pages: list[int] = field(default_factory=list[int])
    version_starts: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be drawn after the steps under way."""
        return self.sampling.max_new_tokens - len(self.token_ids) - self.num_launched

    @property
    def num_tokens(self) -> int:
        """Prompt and response after the steps under way."""
        return len(self.prompt_ids) + len(self.token_ids) + self.num_launched

    @property
    def context_ids(self) -> TokenIds:
        """What has to be prefilled before the next token can be drawn."""
        return (*self.prompt_ids, *self.token_ids)

    def extend(self, token_ids: list[int], log_probs: list[float], *, version: int) -> None:
        """Take in tokens that ``version`` has drawn."""
        if token_ids and (not self.version_starts or self.version_starts[-1][1] != version):
            self.version_starts.append((len(self.token_ids), version))
        self.token_ids += token_ids
        self.log_probs += log_probs


@dataclass(frozen=True, slots=True)
class Entry:
    """Sequences with one context that enter together; the first one's pages are to be filled.

    ``tail_copies``: pages to copy the first one's last, partly filled page to.
    """

    context_ids: TokenIds
    sequences: tuple[Running, ...]
    tail_copies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """Rows, prompt tokens of one prefill, tokens a row may gain between two looks."""

    max_rows: int
    max_prefill_tokens: int
    window_tokens: int


def pages_for(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def _most_pages(group: Sequence[Running]) -> int:
    """Pages of sequences with one context when all have reached their greatest length."""
    first = group[0]
    shared = len(first.prompt_ids) // PAGE_TOKENS if len(group) > 1 else 0
    longest = pages_for(len(first.prompt_ids) + first.sampling.max_new_tokens)
    return shared + len(group) * (longest - shared)


class PagedScheduler:
    """See the module docstring. Its attributes are for reading.

    Attributes:
        rows: what runs, in the order of the device's rows.
        num_preempted: how often a sequence was put back.
        wanted_pages: the most pages that all sequences seen so far can own at once, within the
            limits. No page of a higher number is given out.
        longest_pages: pages of the longest sequence seen so far.
    """

    def __init__(self, limits: Limits, num_pages: int) -> None:
        self._limits = limits
        self._num_pages = num_pages
        self._pool = PagePool(num_pages)
        self._waiting: deque[tuple[Running, ...]] = deque()
        self.rows: list[Running] = []
        self.num_preempted = 0
        self.wanted_pages = 0
        self.longest_pages = 0

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.rows or self._waiting)

    @property
    def num_free_pages(self) -> int:
        """Pages that nobody owns."""
        return self._pool.num_free

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests behind those that wait.

        Raises:
            UserError: a sequence could never be held, even alone.
        """
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            if pages_for(longest) > self._num_pages:
                raise UserError(
                    f"data.max_prompt_length + data.max_response_length={longest}: the key/value "
                    f"cache holds {self._num_pages * PAGE_TOKENS} tokens. Raise "
                    "actor_rollout_ref.rollout.gpu_memory_utilization or shorten the sequences."
                )
            self._waiting.append(
                tuple(
                    Running(sample_id, request.prompt_ids, request.sampling)
                    for sample_id in request.sample_ids
                )
            )
            self.longest_pages = max(self.longest_pages, pages_for(longest))
        self.wanted_pages = max(self.wanted_pages, self._most_pages())

    def admit(self) -> list[Entry]:
        """Let waiting sequences enter as far as rows, pages and the prefill budget allow.

        Rows are given out in lots of an eighth of all, because entering has a fixed cost.
        """
        entries: list[Entry] = []
        num_waiting = sum(map(len, self._waiting))
        lot = min(num_waiting, max(1, self._limits.max_rows // 8))
        if self.rows and self._limits.max_rows - len(self.rows) < lot:
            return entries
        budget = self._limits.max_prefill_tokens
        while self._waiting:
            context = self._waiting[0][0].context_ids
            if entries and len(context) > budget:
                break
            entry = self._enter_head(context)
            if entry is None:
                break
            entries.append(entry)
            budget -= len(context)
        return entries

    def has_window(self) -> bool:
        """Whether the pages that all rows' next window may fill can be had."""
        return sum(map(self._missing, self.rows)) <= self._pool.num_free

    def reserve_window(self) -> None:
        """Give each row the pages its next window may fill; until there are enough, the newest row
        leaves, which takes that nothing is under way."""
        while not self.has_window():
            self._preempt_newest()
        for sequence in self.rows:
            sequence.pages += self._pool.take(self._missing(sequence))

    def preempt_all(self) -> None:
        """Put everything that runs back, in order; nothing may be under way."""
        while self.rows:
            self._preempt_newest()
        self.wanted_pages = max(self.wanted_pages, self._most_pages())

    def remove(self, finished: Sequence[Running]) -> None:
        """Take out finished rows and free what they alone own; the others keep their order."""
        leaving = set(map(id, finished))
        self.rows = [sequence for sequence in self.rows if id(sequence) not in leaving]
        for sequence in finished:
            self._free(sequence)

    def _most_pages(self) -> int:
        """A bound on the pages in use at any time from now on."""
        groups = [*((row,) for row in self.rows), *self._waiting]
        total, num_sequences = sum(map(_most_pages, groups)), sum(map(len, groups))
        if num_sequences > self._limits.max_rows or total + num_sequences > self._num_pages:
            # A group may then enter in parts, each with shared pages of its own.
            total = sum(_most_pages((sequence,)) for group in groups for sequence in group)
        return min(total, self._limits.max_rows * self.longest_pages, self._num_pages)

    def _enter_head(self, context: TokenIds) -> Entry | None:
        """The head of the queue, or as much of it as there is room for."""
        head = self._waiting[0]
        num_full, tail = divmod(len(context), PAGE_TOKENS)
        own = pages_for(self._first_end(head[0])) - num_full
        spare = self._pool.num_free - num_full - len(self.rows)
        count = min(len(head), self._limits.max_rows - len(self.rows), spare // max(1, own))
        if count <= 0 and not self.rows and own + num_full <= self._pool.num_free:
            count = 1
        if count <= 0:
            return None
        shared = self._pool.take(num_full)
        self._pool.share(shared, owners=count - 1)
        entering = head[:count]
        for sequence in entering:
            sequence.pages = shared + self._pool.take(own)
        self._waiting.popleft()
        if count < len(head):
            self._waiting.appendleft(head[count:])
        self.rows += entering
        copies = tuple(sequence.pages[num_full] for sequence in entering[1:]) if tail else ()
        return Entry(context, entering, copies)

    def _first_end(self, sequence: Running) -> int:
        """Tokens whose keys are stored after the first draw and a window behind it."""
        steps = min(self._limits.window_tokens, sequence.num_remaining - 1)
        return sequence.num_tokens + steps

    def _missing(self, sequence: Running) -> int:
        """Pages it lacks for its next window, whose first step stores the newest token's key."""
        steps = min(self._limits.window_tokens, sequence.num_remaining)
        return max(0, pages_for(sequence.num_tokens - 1 + steps) - len(sequence.pages))

    def _preempt_newest(self) -> None:
        sequence = self.rows.pop()
        assert sequence.num_launched == 0, f"sample {sequence.sample_id} has steps under way"
        self._free(sequence)
        self._waiting.appendleft((sequence,))
        self.num_preempted += 1

    def _free(self, sequence: Running) -> None:
        self._pool.release(sequence.pages)
        sequence.pages = []
