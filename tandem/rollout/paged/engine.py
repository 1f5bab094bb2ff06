# SPDX-License-Identifier: Apache-2.0
"""The native rollout engine for accelerators, over the trainer's decoder in the trainer's storage.

Prompts are prefilled once for all their samples, again if other weights come into use meanwhile.
Steps are captured, sample and find ends on the device. The host launches a window of steps before
it reads the last one, so that the device never waits; a sequence that has ended is carried along
for up to a window more. Tokens depend on weights, prompt, sampling parameters and (seed, sample
id), up to rounding of logits; not on the batch.

Shapes: B running rows, n rows entering, P prompts, T packed tokens, W tokens of a window, N pages
of a block table.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.operators import upload
from tandem.platforms.capture import Capturer
from tandem.rollout.ending import finish_reason
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.paged.cache import PAGE_TOKENS, PageStore, RowState, Window
from tandem.rollout.paged.kernels.sampling import draw_next
from tandem.rollout.paged.prefill import PrefillAttention
from tandem.rollout.paged.scheduler import Entry, Limits, PagedScheduler, Running
from tandem.rollout.paged.step import DecodeStep
from tandem.rollout.settings import CacheShape, NativeRolloutConfig
from tandem.types import Completion, GenerationRequest

WINDOW_TOKENS = 8
"""Steps between two looks of the host."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A window under way: its rows in the order of the device, the most tokens each may draw in
    it, and what will have been read of them when ``event`` has come."""

    rows: tuple[Running, ...]
    num_launched: tuple[int, ...]
    numbers: Tensor
    token_BW: Tensor
    logp_BW: Tensor
    event: torch.Event | None


class PagedRolloutEngine:
    """``api.RolloutEngine`` on one accelerator. The decoder is read, never copied."""

    def __init__(
        self,
        decoder: Decoder,
        config: NativeRolloutConfig,
        *,
        make_capturer: Callable[[], Capturer],
        num_multiprocessors: int,
    ) -> None:
        """
        Args:
            make_capturer: once for each set of buffers.
            num_multiprocessors: of the device, by which the work of attention is divided.
        """
        self._decoder = decoder
        self._config = config
        self._make_capturer = make_capturer
        self._num_multiprocessors = num_multiprocessors
        self._shape = CacheShape.of(decoder)
        self._device = self._shape.device
        max_pages = config.max_cache_bytes // (self._shape.bytes_per_token * PAGE_TOKENS)
        limits = Limits(config.max_num_seqs, config.max_num_batched_tokens, WINDOW_TOKENS)
        self._scheduler = PagedScheduler(limits, max_pages)
        self._store: PageStore | None = None
        self._step: DecodeStep | None = None
        self._flight: _Flight | None = None
        self._slots: dict[int, int] = {}
        self._pins = self._device.type != "cpu"
        self._weights_version = 0
        self._is_outdated = False
        self._finished: list[Completion] = []
        self.num_prefilled_tokens = 0
        self.num_decoded_tokens = 0

    @property
    def num_preempted(self) -> int:
        """Sequences that were put back because pages ran out, since the start."""
        return self._scheduler.num_preempted

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed. Raises UserError if one can never be held."""
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            self._decoder.rotary.require_length(longest)
        self._scheduler.add(requests)

    def settle(self) -> None:
        """See ``api.RolloutEngine``. The window under way is read."""
        last, self._flight = self._flight, None
        if last is not None:
            self._finished += self._collect(last)

    def release_cache(self) -> bool:
        """See ``api.RolloutEngine``. Steps that were captured over it go, too."""
        if self._scheduler.has_work or self._finished:
            return False
        self._store = self._step = self._flight = None
        return True

    def set_weights_version(self, version: int) -> bool:
        """See ``api.RolloutEngine``. What pages hold is computed again before the next step: once,
        however often the weights have changed by then; or it is kept.
        """
        if version == self._weights_version:
            return True
        self.settle()
        self._weights_version = version
        self._is_outdated |= not self._config.keeps_cache
        return True

    @torch.inference_mode()
    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """See ``api.RolloutEngine``. Steps come in whole windows, of which the last one is read
        by the next call."""
        completions, self._finished = self._finished, []
        windows = repeat(None) if max_steps is None else range(-(-max_steps // WINDOW_TOKENS))
        for _ in windows:
            if completions or not self._scheduler.has_work:
                break
            last, self._flight = self._flight, self._launch()
            if last is not None:
                completions = self._collect(last)
        if not self._scheduler.has_work:
            self._flight = None  # its rows have all ended
        return completions

    def _launch(self) -> _Flight | None:
        """Start the next window; None if nothing is left to run, or if what is under way must be
        read first: to preempt, or to move to larger buffers."""
        scheduler, last = self._scheduler, self._flight
        if last is not None and not (scheduler.has_window() and self._fits()):
            return None
        scheduler.reserve_window()
        if self._store is not None and self._store.num_pages < scheduler.wanted_pages:
            # The device need not have room for both: what these pages hold is computed again.
            self._store = self._step = None
            self._is_outdated = True
        kept = list(scheduler.rows)
        outdated = scheduler.recompute() if self._is_outdated else []
        entries = scheduler.admit()
        rows = scheduler.rows
        new = rows[len(kept) :]
        wanted = [row.num_remaining for row in kept] + [row.num_remaining - 1 for row in new]
        num_steps = min(WINDOW_TOKENS, max(wanted, default=0))
        if num_steps <= 0 and not new:
            return None
        store, step = self._memory()
        self._arrange(step, rows, num_kept=len(kept) if last is not None else 0)
        replay = step.prepare(len(rows), store, filtered=any(map(_is_filtered, rows)))
        self._draw_uniforms(step, len(rows))
        for again in outdated:
            self._fill(again, store)
        self._is_outdated = False
        if entries:
            self._prefill(entries, step, store=store, first_row=len(kept))
        for _ in range(num_steps):
            replay()
        launched = [min(num_steps, row.num_remaining) for row in kept]
        launched += [min(num_steps + 1, row.num_remaining) for row in new]
        return self._read(step, rows, launched=launched)

    def _fits(self) -> bool:
        """Whether pages and buffers are large enough for what has been added since."""
        scheduler, store, step = self._scheduler, self._store, self._step
        return (
            store is not None
            and step is not None
            and store.num_pages >= scheduler.wanted_pages
            and step.table_RN.shape[1] >= scheduler.longest_pages
        )

    def _memory(self) -> tuple[PageStore, DecodeStep]:
        """Pages and buffers for what runs and waits."""
        table_pages = self._scheduler.longest_pages
        if self._store is None:
            self._store = PageStore(self._shape, self._scheduler.wanted_pages)
        if self._step is None or self._step.table_RN.shape[1] < table_pages:
            self._step = None
            config = self._config
            window = Window.allocate(
                config.max_num_seqs,
                WINDOW_TOKENS + 1,
                eos_ids=config.eos_ids,
                device=self._device,
            )
            size = (config.max_num_seqs, table_pages)
            self._step = DecodeStep(
                self._decoder,
                self._make_capturer(),
                table_RN=torch.zeros(size, dtype=torch.int32, device=self._device),
                window=window,
                num_multiprocessors=self._num_multiprocessors,
            )
        return self._store, self._step

    def _arrange(self, step: DecodeStep, rows: Sequence[Running], *, num_kept: int) -> None:
        """State and page tables of all rows, in their order. The first ``num_kept`` were in the
        last window, and only the device knows how far they are."""
        state, kept = step.state, rows[:num_kept]
        if kept:
            slots = upload(torch.tensor([self._slots[id(row)] for row in kept]), self._device)
            numbers = state.numbers.index_select(0, slots)
            numbers[:, RowState.NUM_DRAWN] += numbers[:, RowState.COUNT]
            numbers[:, RowState.COUNT] = 0
            state.numbers[:num_kept] = numbers
            state.settings[:num_kept] = state.settings.index_select(0, slots)
        new = rows[num_kept:]
        if new:
            numbers = torch.tensor([_numbers(row) for row in new])
            numbers[:, RowState.STREAM_KEY] = stream_keys(
                self._config.seed, [row.sample_id for row in new]
            )
            settings = torch.tensor([(row.sampling.temperature, row.sampling.top_p) for row in new])
            state.numbers[num_kept : len(rows)] = upload(numbers, self._device)
            state.settings[num_kept : len(rows)] = upload(settings, self._device)
        self._slots = {id(row): slot for slot, row in enumerate(rows)}
        table = np.zeros((len(rows), step.table_RN.shape[1]), dtype=np.int32)
        for line, row in zip(table, rows, strict=True):
            line[: len(row.pages)] = row.pages
        step.table_RN[: len(rows)] = upload(torch.from_numpy(table), self._device)

    def _draw_uniforms(self, step: DecodeStep, num_rows: int) -> None:
        """The random numbers of the next window."""
        numbers = step.state.numbers[:num_rows]
        window_W = torch.arange(WINDOW_TOKENS + 1, device=self._device)
        positions_BW = numbers[:, RowState.NUM_DRAWN, None] + window_W
        key_B = numbers[:, RowState.STREAM_KEY]
        step.window.uniform_BW[:num_rows] = uniforms(key_B, positions_BW)

    def _prefill(
        self, entries: Sequence[Entry], step: DecodeStep, *, store: PageStore, first_row: int
    ) -> None:
        """Fill the pages of the entering rows and draw their first tokens."""
        logits_PV = step.logits(self._fill(entries, store))
        counts = torch.tensor([len(entry.sequences) for entry in entries])
        source_n = torch.arange(len(entries), dtype=torch.int32).repeat_interleave(counts)
        rows = slice(first_row, first_row + len(source_n))
        sequences = [sequence for entry in entries for sequence in entry.sequences]
        draw_next(
            logits_PV,
            step.state.rows(rows),
            window=step.window.rows(rows),
            filtered=any(map(_is_filtered, sequences)),
            logits_row_B=upload(source_n, self._device),
        )

    def _fill(self, entries: Sequence[Entry], store: PageStore) -> Tensor:
        """Compute the runs of one pass and fill pages; hidden states (P, D) at their ends."""
        attention = PrefillAttention(
            [entry.run for entry in entries],
            store,
            make_attention=self._decoder.operators.packed_attention,
        )
        packed = attention.packed
        h_TD = self._decoder(packed.token_T, packed.position_T, attention)
        store.copy_tails([copy for entry in entries for copy in entry.tail_copies])
        self.num_prefilled_tokens += len(h_TD)
        return h_TD.index_select(0, packed.last_S)

    def _read(self, step: DecodeStep, rows: Sequence[Running], *, launched: list[int]) -> _Flight:
        """Queue the copies to the host behind the window."""
        num_rows = len(rows)
        for row, count in zip(rows, launched, strict=True):
            row.num_launched += count
        sources = (step.state.numbers, step.window.token_BW, step.window.logp_BW)
        copies = [
            torch.empty_like(source[:num_rows], device="cpu", pin_memory=self._pins).copy_(
                source[:num_rows], non_blocking=True
            )
            for source in sources
        ]
        event = None
        if self._pins:
            event = torch.Event(self._device)
            event.record()
        return _Flight(tuple(rows), tuple(launched), copies[0], copies[1], copies[2], event)

    def _collect(self, flight: _Flight) -> list[Completion]:
        """Read what a window drew; completions of the rows that ended in it."""
        if flight.event is not None:
            flight.event.synchronize()
        counts = flight.numbers[:, RowState.COUNT].tolist()
        active = flight.numbers[:, RowState.ACTIVE].tolist()
        tokens, log_probs = flight.token_BW.tolist(), flight.logp_BW.tolist()
        finished: list[Running] = []
        for index, row in enumerate(flight.rows):
            row.num_launched -= flight.num_launched[index]
            if not row.pages:
                continue  # it had ended in the window before
            count = counts[index]
            row.extend(
                tokens[index][:count], log_probs[index][:count], version=self._weights_version
            )
            if not active[index]:
                finished.append(row)
        self.num_decoded_tokens += sum(counts)
        self._scheduler.remove(finished)
        return [self._completion(row) for row in finished]

    def _completion(self, row: Running) -> Completion:
        stopped = not row.sampling.ignore_eos and row.token_ids[-1] in self._config.eos_ids
        return Completion(
            sample_id=row.sample_id,
            token_ids=array("i", row.token_ids),
            log_probs=array("f", row.log_probs),
            finish_reason=finish_reason(row.log_probs[-1], stopped=stopped),
            weights_version=row.version_starts[0][1],
            switches=tuple(row.version_starts[1:]),
        )


def _numbers(row: Running) -> tuple[int, ...]:
    """The fields of ``RowState.numbers`` but for the stream's key.

    A row that enters stands before its last context token: the draw moves it on.
    """
    newest = row.token_ids[-1] if row.token_ids else 0
    ignore_eos, top_k = int(row.sampling.ignore_eos), max(0, row.sampling.top_k)
    position, drawn = row.num_tokens - 1, len(row.token_ids)
    return (newest, position, row.num_remaining, 1, 0, ignore_eos, top_k, 0, drawn)


def _is_filtered(row: Running) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1
