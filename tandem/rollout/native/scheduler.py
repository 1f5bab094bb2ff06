# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping of continuous batching in plain integers: the queue, and the rows in use.

Running sequences occupy rows 0..B-1 without gaps. All rows share one clock, the *column*, which
counts decode steps. A row's prompt ends in the column before its first token. The newest token of
every row is in the current column: one slice serves rows of all lengths. A prompt is prefilled
once, and its samples without a free row enter later from the same prefill. Sequences enter in order
of arrival, further turns before new prompts, and none is preempted. There are no tensors and no
model here: the caller carries out an ``Admission`` or a ``Removal``.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tandem.pictures import Picture
from tandem.rollout.order import put_behind_older
from tandem.rollout.sampler import DrawRule
from tandem.rollout.settings import Limits
from tandem.types import GenerationRequest, TokenIds


@dataclass(frozen=True, slots=True)
class Row:
    """A running sequence.

    Attributes:
        start: the column of its first prompt token.
        first: the column of its first generated token.
        last: the column of the last token that it may generate.
        weights_version: the version that was in use when it entered.
        first_index, pictures: as in ``GenerationRequest``.
        switches: (column, version) pairs: the first column of each later version.
        may_continue: whether its states are kept for a further turn when it ends.
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
    first_index: int = 0
    pictures: tuple[Picture, ...] = ()
    may_continue: bool = False


@dataclass(frozen=True, slots=True)
class Admission:
    """New rows, appended after the running ones.

    Attributes:
        prompts: the prompts to prefill now. If empty, all rows belong to the last prompt admitted
            before.
        num_rows: the number of rows of each prompt, in order.
        rows: the new rows.
    """

    prompts: tuple[TokenIds, ...]
    num_rows: tuple[int, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Rows that left, and the moves from ``sources`` to ``targets`` that close the gaps."""

    rows: tuple[Row, ...]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class Scheduler:
    """The queue and the rows in use. Callers only read ``rows`` and ``column``.

    Args:
        max_cache_tokens: a bound on (number of rows) x (greatest length that a row may reach). A
            single sequence always runs.
    """

    def __init__(self, limits: Limits, *, max_cache_tokens: int) -> None:
        self._limits = limits
        self._max_cache_tokens = max_cache_tokens
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
        """Whether any sequence runs or waits."""
        return bool(self.rows or self._waiting)

    @property
    def prefilled_head(self) -> TokenIds | None:
        """The prefilled prompt whose samples still wait for rows; None if there is none."""
        return self._waiting[0].prompt_ids if self._head_is_prefilled else None

    def rows_by_prompt(self) -> dict[TokenIds, list[int]]:
        """Return each prompt's rows; none for a prefilled head whose rows have ended."""
        rows: dict[TokenIds, list[int]] = {}
        for index, row in enumerate(self.rows):
            rows.setdefault(row.prompt_ids, []).append(index)
        if self._head_is_prefilled:
            rows.setdefault(self._waiting[0].prompt_ids, [])
        return rows

    def pictures_of(self, prompts: Sequence[TokenIds]) -> list[Picture]:
        """Return the pictures of prompts, which running rows or the prefilled head have."""
        found = {row.prompt_ids: row.pictures for row in self.rows if row.pictures}
        if self._head_is_prefilled and self._waiting[0].pictures:
            found[self._waiting[0].prompt_ids] = self._waiting[0].pictures
        if not found:
            return []
        return [picture for prompt in prompts for picture in found.get(prompt, ())]

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
        """The number of rows, within the limits, once the whole queue has entered."""
        wanted = len(self.rows) + self._num_waiting
        limit = self._max_cache_tokens // max(1, self._longest)
        return max(len(self.rows), min(wanted, self._limits.max_rows, limit))

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue; further turns come before new prompts."""
        for request in requests:
            assert request.prompt_ids, f"samples {request.sample_ids}: the prompt has no tokens"
            assert request.sampling.max_new_tokens > 0, f"samples {request.sample_ids}: no tokens"
        further = [request for request in requests if request.first_index > 0]
        # A head whose prompt is prefilled stays the head.
        head = [self._waiting.popleft()] if self._head_is_prefilled else []
        put_behind_older(self._waiting, further, is_older=lambda one: one.first_index > 0)
        self._waiting.extendleft(head)
        self._waiting.extend([request for request in requests if request.first_index == 0])
        self._num_waiting += sum(len(request.sample_ids) for request in requests)

    def set_weights_version(self, version: int) -> bool:
        """Tag tokens from the next column on. Return whether the version is a new one."""
        if version == self._weights_version:
            return False
        self._weights_version = version
        self.rows = [_switched(row, self.column + 1, version=version) for row in self.rows]
        return True

    def admit(self) -> Admission | None:
        """Let waiting samples enter within the limits. Return None if none enters now.

        Samples enter when a quarter of all rows is free, because entering has a fixed cost.
        """
        chunk = min(self._num_waiting, max(1, self._limits.max_rows // 4))
        if chunk == 0 or (self.rows and self._limits.max_rows - len(self.rows) < chunk):
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
        """Move to the next column, which takes the tokens of the decode step just computed."""
        self.column += 1

    def ended(self, stopped: Sequence[int]) -> list[int]:
        """Return the rows that end with their newest token, ascending.

        Args:
            stopped: the rows whose newest token is an end token.
        """
        column, rows = self.column, self.rows
        ended = {i for i in stopped if not rows[i].ignore_eos}
        if column >= self._next_last:
            ended.update([i for i, row in enumerate(rows) if row.last == column])
        return sorted(ended)

    def remove(self, ended: Sequence[int]) -> Removal:
        """Remove the rows ``ended`` (ascending), and fill their places from the end."""
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
        """Append rows for samples of the head request while there is room; return their number."""
        request = self._waiting[0]
        length = len(request.prompt_ids) + request.sampling.max_new_tokens
        longest = max(self._longest, length)
        by_cache = self._max_cache_tokens // longest
        room = min(self._limits.max_rows, by_cache) - len(self.rows)
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
            Row(
                sample_id,
                prompt_ids,
                start,
                column,
                last,
                ignore_eos,
                rule,
                version,
                first_index=request.first_index,
                pictures=request.pictures,
                may_continue=request.continues and not request.pictures,
            )
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
    earlier = tuple(switch for switch in row.switches if switch[0] < column)
    return replace(row, switches=(*earlier, (column, version)))
