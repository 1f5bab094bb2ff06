# SPDX-License-Identifier: Apache-2.0
"""What waits, what runs and in which row: the bookkeeping of continuous batching in plain integers.

Running sequences occupy rows 0..B-1 without gaps. All rows share one clock, the *column*: it counts
decode steps, a row's prompt ends in the column before its first token, and the newest token of
every row stands in the current column, so that one slice serves all rows whatever their lengths. A
prompt is prefilled once; when its samples do not all fit, the others follow later from the same
prefill. First come, first served; nothing is preempted. No tensors, no model: the caller does what
an ``Admission`` or a ``Removal`` says.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.rollout.sampler import DrawRule
from tandem.types import GenerationRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a scheduler.

    Attributes:
        max_sequences: rows that run together.
        max_prefill_tokens: prompt tokens of one prefill pass; a longer single prompt still passes.
        max_cache_tokens: bound on rows x the greatest length that one of them may reach; one
            sequence alone still runs.
    """

    max_sequences: int
    max_prefill_tokens: int
    max_cache_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One running sequence.

    ``start``, ``first`` and ``last`` are the columns of its first prompt token, of its first
    generated token and of the last token it may generate; ``weights_version`` is the one it entered
    with, ``switches`` the columns from which on later ones were in use.
    """

    sample_id: int
    prompt_ids: TokenIds
    start: int
    first: int
    last: int
    ignore_eos: bool
    rule: DrawRule
    weights_version: int
    switches: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """New rows, appended after the running ones.

    ``prompts`` are to be prefilled now; the first ``num_rows[0]`` rows belong to the first of them,
    and so on. When ``prompts`` is empty, all rows continue the last prompt of the admission before.
    """

    prompts: tuple[TokenIds, ...]
    num_rows: tuple[int, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows that left, and the moves, ``sources`` to ``targets``, that close the gaps."""

    rows: tuple[Row, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Scheduler:
    """See the module docstring. ``rows`` and ``column`` are for reading."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[GenerationRequest] = deque()
        self._num_waiting = 0
        self._head_is_prefilled = False
        self._weights_version = 0
        self._rules: Counter[DrawRule] = Counter()
        self._num_stopping = 0
        self._next_last = 0
        self._longest = 0
        self.rows: list[Row] = []
        self.column = 0

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.rows or self._waiting)

    @property
    def prefilled_head(self) -> TokenIds | None:
        """The prompt that has been prefilled, and of which samples still wait for rows."""
        return self._waiting[0].prompt_ids if self._head_is_prefilled else None

    def rows_by_prompt(self) -> dict[TokenIds, list[int]]:
        """The rows of each prompt whose states are in use; those of the head may all have ended."""
        rows: dict[TokenIds, list[int]] = {}
        for index, row in enumerate(self.rows):
            rows.setdefault(row.prompt_ids, []).append(index)
        if self._head_is_prefilled:
            rows.setdefault(self._waiting[0].prompt_ids, [])
        return rows

    @property
    def rules(self) -> tuple[DrawRule, ...]:
        """The distinct draw rules of the running rows."""
        return tuple(self._rules)

    @property
    def stops_at_eos(self) -> bool:
        """Whether an end token ends any running row."""
        return self._num_stopping > 0

    @property
    def oldest_column(self) -> int:
        """The first column that a running row needs; the current one when nothing runs."""
        return min([row.start for row in self.rows], default=self.column)

    @property
    def last_column(self) -> int:
        """The last column that a running row may reach; the current one when nothing runs."""
        return max([row.last for row in self.rows], default=self.column)

    @property
    def wanted_rows(self) -> int:
        """Rows in use once all that waits now has entered, as far as the limits allow."""
        wanted = len(self.rows) + self._num_waiting
        limit = self._limits.max_cache_tokens // max(1, self._longest)
        return max(len(self.rows), min(wanted, self._limits.max_sequences, limit))

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests behind those that wait."""
        for request in requests:
            assert request.prompt_ids, f"samples {request.sample_ids}: the prompt has no tokens"
            assert request.sampling.max_new_tokens > 0, f"samples {request.sample_ids}: no tokens"
        self._waiting.extend(requests)
        self._num_waiting += sum(len(request.sample_ids) for request in requests)

    def set_weights_version(self, version: int) -> bool:
        """Tag tokens from the next column on; returns whether it is another version."""
        if version == self._weights_version:
            return False
        self._weights_version = version
        self.rows = [_switched(row, self.column + 1, version=version) for row in self.rows]
        return True

    def admit(self) -> Admission | None:
        """Let waiting samples enter as far as the limits allow; None if nothing enters now.

        Rows are given out in lots of a quarter of all, because entering has a fixed cost.
        """
        lot = min(self._num_waiting, max(1, self._limits.max_sequences // 4))
        if lot == 0 or (self.rows and self._limits.max_sequences - len(self.rows) < lot):
            return None
        num_before = len(self.rows)
        self._longest = max([row.last + 1 - row.start for row in self.rows], default=0)
        if self._head_is_prefilled:
            prompts: tuple[TokenIds, ...] = ()
            num_rows = (self._enter_head(),)
        else:
            prompts, num_rows = self._enter_prompts()
        rows = tuple(self.rows[num_before:])
        self._next_last = min([row.last for row in self.rows])
        return Admission(prompts, num_rows, rows) if rows else None

    def tick(self) -> None:
        """A decode step has been run: its tokens stand in the next column."""
        self.column += 1

    def ended(self, stopped: Sequence[int]) -> list[int]:
        """Rows that end with their newest token, given those where it is an end token."""
        column, rows = self.column, self.rows
        ended = {i for i in stopped if not rows[i].ignore_eos}
        if column >= self._next_last:
            ended.update([i for i, row in enumerate(rows) if row.last == column])
        return sorted(ended)

    def remove(self, ended: Sequence[int]) -> Removal:
        """Take out the rows ``ended`` (ascending), filling their places from the end."""
        num_kept = len(self.rows) - len(ended)
        leaving = set(ended)
        targets = tuple([i for i in ended if i < num_kept])
        sources = tuple([i for i in range(num_kept, len(self.rows)) if i not in leaving])
        removed = tuple([self.rows[i] for i in ended])
        for target, source in zip(targets, sources, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[num_kept:]
        self._num_stopping -= sum([not row.ignore_eos for row in removed])
        self._rules.subtract([row.rule for row in removed])
        self._rules = +self._rules
        self._next_last = min([row.last for row in self.rows], default=0)
        return Removal(removed, sources, targets)

    def _enter_prompts(self) -> tuple[tuple[TokenIds, ...], tuple[int, ...]]:
        prompts: list[TokenIds] = []
        num_rows: list[int] = []
        num_tokens = 0
        while self._waiting and not self._head_is_prefilled:
            request = self._waiting[0]
            num_tokens += len(request.prompt_ids)
            if prompts and num_tokens > self._limits.max_prefill_tokens:
                break
            entered = self._enter_head()
            if entered == 0:
                break
            num_rows.append(entered)
            prompts.append(request.prompt_ids)
        return tuple(prompts), tuple(num_rows)

    def _enter_head(self) -> int:
        """Append rows for the head request's samples as far as there is room; their number."""
        request = self._waiting[0]
        length = len(request.prompt_ids) + request.sampling.max_new_tokens
        longest = max(self._longest, length)
        by_cache = self._limits.max_cache_tokens // longest
        room = min(self._limits.max_sequences, by_cache) - len(self.rows)
        count = min(len(request.sample_ids), room if self.rows else max(1, room))
        if count <= 0:
            return 0
        self._longest = longest
        rule, column = DrawRule.of(request.sampling), self.column
        start = column - len(request.prompt_ids)
        last = start + length - 1
        ignore_eos, version = request.sampling.ignore_eos, self._weights_version
        prompt_ids = request.prompt_ids
        self.rows += [
            Row(sample_id, prompt_ids, start, column, last, ignore_eos, rule, version)
            for sample_id in request.sample_ids[:count]
        ]
        self._rules[rule] += count
        self._num_stopping += 0 if ignore_eos else count
        self._num_waiting -= count
        self._head_is_prefilled = count < len(request.sample_ids)
        if self._head_is_prefilled:
            self._waiting[0] = replace(request, sample_ids=request.sample_ids[count:])
        else:
            self._waiting.popleft()
        return count


def _switched(row: Row, column: int, *, version: int) -> Row:
    """``row`` with ``version`` from ``column`` on."""
    earlier = tuple(switch for switch in row.switches if switch[0] < column)
    return replace(row, switches=(*earlier, (column, version)))
