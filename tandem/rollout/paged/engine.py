# SPDX-License-Identifier: Apache-2.0
"""The paged rollout engine for accelerators, over the trainer's decoder, in its storage.

Prompts are prefilled once for all their samples, and again after a weight update. Steps are
captured; they sample and detect ends on the device. The host launches a window of steps before it
reads the previous one, which keeps the device busy. A sequence that has ended therefore stays in
the batch for up to one more window. Tokens depend on weights, prompt, sampling parameters and
(seed, sample id), up to rounding of logits, and not on the batch.

Shapes: B running rows, n rows entering, P prompts, T packed tokens, t tokens of a run, W tokens of
a window, N pages of a block table, L layers with experts, X experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from tandem.api import Capacity, EngineFacts
from tandem.models.decoder import Decoder
from tandem.models.operators import upload
from tandem.models.quantized import QuantizedDecoder
from tandem.pictures import total_shift
from tandem.platforms.capture import Capturer
from tandem.rollout.completion import complete
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.lock_step import LockStep
from tandem.rollout.paged.cache import PAGE_TOKENS, PageStore, RowState, Window
from tandem.rollout.paged.kernels.sampling import draw_next
from tandem.rollout.paged.prefill import PrefillAttention
from tandem.rollout.paged.rounds import Round, Rounds
from tandem.rollout.paged.scheduler import Entry, PagedScheduler, Running, num_saved_pages
from tandem.rollout.paged.step import DecodeStep, Variant, batch_sizes, rows_of_tile
from tandem.rollout.recording import recorder_of, routes_like
from tandem.rollout.resting import Resting
from tandem.rollout.settings import CacheShape, NativeRolloutConfig
from tandem.types import Completion, GenerationRequest

WINDOW_TOKENS = 8
"""Steps between two reads by the host."""
LEAST_SHARED_BYTES = 192 << 20
"""How much less a layer must read, in bytes, for the pages of a prompt to be read once for several
of its samples. This adds an operation to each layer (benchmarks/DIARY.md).
"""


@dataclass(frozen=True, slots=True)
class _PassRoutes:
    """The runs of a prefill pass, and a copy of the experts of its tokens on the host."""

    entries: tuple[Entry, ...]
    routes_TLX: Tensor

    def record(self) -> None:
        """Give each sequence the routes of its run, once the copy is complete."""
        stop = 0
        for entry in self.entries:
            start, stop = stop, stop + len(entry.run.token_ids)
            routes_tLX = self.routes_TLX[start:stop].numpy()
            if entry.run.start == 0:
                first = entry.sequences[0]
                first.routes.shared.routes_tLX = routes_tLX[: len(first.prompt_ids)].copy()
            for sequence in entry.sequences:
                sequence.routes.record(routes_tLX, start=entry.run.start)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched window of steps.

    Attributes:
        rows: its rows, in the order of the device.
        num_launched: the most tokens that each row may draw in it.
        numbers, token_BW, logp_BW, routes_BWLX: copies on the host, which are complete after
            ``event``. There are no routes if they are not recorded.
        passes: the routes of the prefill passes before its steps.
    """

    rows: tuple[Running, ...]
    num_launched: tuple[int, ...]
    numbers: Tensor
    token_BW: Tensor
    logp_BW: Tensor
    routes_BWLX: Tensor | None
    passes: tuple[_PassRoutes, ...]
    event: torch.Event | None


class PagedRolloutEngine(Resting):
    """An ``api.RolloutEngine`` on one accelerator. It reads the decoder and never copies it."""

    def __init__(
        self,
        decoder: Decoder,
        config: NativeRolloutConfig,
        *,
        make_capturer: Callable[[], Capturer],
        num_multiprocessors: int,
        quantized: QuantizedDecoder | None = None,
        lock_step: LockStep | None = None,
        page_tokens: int = PAGE_TOKENS,
        least_shared_bytes: int = LEAST_SHARED_BYTES,
    ) -> None:
        """Build the engine. The first ``advance`` allocates its memory.

        Args:
            make_capturer: makes a capturer for each set of buffers.
            num_multiprocessors: the device's; attention is divided among them.
            quantized: computes in place of ``decoder``, whose weights it reads.
            lock_step: lets processes that divide the experts of ``decoder`` compute together.
            page_tokens: tokens of a page of the cache.
            least_shared_bytes: see ``LEAST_SHARED_BYTES``.
        """
        self._decoder = decoder
        self._quantized = quantized
        self._config = config
        self._make_capturer = make_capturer
        self._num_multiprocessors = num_multiprocessors
        self._sizes = batch_sizes(config.max_num_seqs)
        self._rounds: Rounds | None = None
        if lock_step is not None:
            self._rounds = Rounds(
                decoder, lock_step, make_capturer=make_capturer, sizes=self._sizes
            )
            lock_step.attend = self._rounds.attend
        self._shape = CacheShape.of(decoder)
        self._device = self._shape.device
        self._page_tokens = page_tokens
        self._least_shared_bytes = least_shared_bytes
        max_pages = config.max_cache_bytes // (self._shape.bytes_per_token * page_tokens)
        self._scheduler = PagedScheduler(
            config.limits,
            max_pages,
            window_tokens=WINDOW_TOKENS,
            page_tokens=page_tokens,
            keeps_turns=config.keeps_turns,
        )
        self.facts = EngineFacts(
            shares_weights=True,
            draws_by_key=True,
            stops_within_sequences=True,
            keeps_cache=config.keeps_cache,
        )
        self.capacity = Capacity(config.max_num_seqs, max_pages * page_tokens)
        self._store: PageStore | None = None
        self._step: DecodeStep | None = None
        self._experts = decoder.config.experts if config.records_routes else None
        self._passes: list[_PassRoutes] = []
        self._flight: _Flight | None = None
        self._slots: dict[int, int] = {}
        self._pins = self._device.type != "cpu"
        self._weights_version = 0
        self._is_outdated = False
        self._finished: list[Completion] = []
        self.num_prefilled_tokens = self.num_decoded_tokens = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed. Raise UserError if one never fits into the cache."""
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            self._decoder.rotary.require_length(longest)
        self._scheduler.add(requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Release the pages of samples that get no further turn."""
        self._scheduler.parking.forget(sample_ids)

    def settle(self) -> None:
        """Wait for the launched window and read it."""
        last, self._flight = self._flight, None
        if last is not None:
            self._finished += self._collect(last)

    def sleep(self) -> bool:
        """Free the cache and the steps captured over it, unless there is something to generate.
        Return whether they were freed.
        """
        if self._scheduler.has_work or self._finished:
            return False
        self._store = self._step = self._flight = None
        self._scheduler.parking.clear()
        if self._quantized is not None:
            self._quantized.free()
        if self._rounds is not None:
            self._rounds.free()
        return True

    def sink(self) -> None:
        """Return None: the decoder's own weights change."""

    def metrics(self) -> Mapping[str, float]:
        """Return how many tokens were prefilled, decoded and kept between turns, how many sequences
        were preempted, and of how many that wait for a turn the pages were taken.
        """
        parking = self._scheduler.parking
        return {
            "num_prefilled_tokens": self.num_prefilled_tokens,
            "num_decoded_tokens": self.num_decoded_tokens,
            "num_preempted": self._scheduler.num_preempted,
            "num_kept_tokens": parking.num_reused,
            "num_evicted": parking.num_evicted,
        }

    def set_weights_version(self, version: int) -> bool:
        """Tag later tokens with ``version``. Unless pages are kept, the next step recomputes those
        of rows, and those that are parked are given up.
        """
        if version == self._weights_version:
            return True
        self.settle()
        self._weights_version = version
        if self._quantized is not None:
            self._quantized.outdate()
        if not self._config.keeps_cache:
            self._scheduler.parking.clear()
            self._is_outdated = True
        return True

    @torch.inference_mode()
    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes. The next call reads the last window."""
        completions, self._finished = self._finished, []
        windows = repeat(None) if max_steps is None else range(-(-max_steps // WINDOW_TOKENS))
        for _ in windows:
            if completions or not self._scheduler.has_work:
                break
            if self._rounds is not None and not self._rounds.lock_step.may_step():
                break
            last, self._flight = self._flight, self._launch()
            if last is not None:
                completions = self._collect(last)
        if self._rounds is not None:
            self._rounds.lock_step.leave(stops=bool(completions) or self._scheduler.has_work)
        if not self._scheduler.has_work:
            self._flight = None  # its rows have all ended
        return completions

    def _launch(self) -> _Flight | None:
        """Launch the next window. Return None if nothing is left to run, or if the last window must
        be read first, because a row must be preempted or a buffer must grow.
        """
        scheduler, last = self._scheduler, self._flight
        if last is not None and not (scheduler.has_window() and self._fits()):
            return None
        scheduler.reserve_window()
        if self._store is not None and self._store.num_pages < scheduler.wanted_pages:
            # The device may lack room for both stores. The pages are recomputed.
            self._store = self._step = None
            self._scheduler.parking.clear()
            self._is_outdated = True
        kept = list(scheduler.rows)
        outdated = scheduler.recompute() if self._is_outdated else []
        entries = scheduler.admit()
        new = scheduler.rows[len(kept) :]
        shared = self._shares_pages(scheduler.rows)
        if shared:
            kept.sort(key=lambda row: row.last_common_page)
        rows = kept + new
        wanted = [row.num_remaining for row in kept] + [row.num_remaining - 1 for row in new]
        num_steps = max(0, min(WINDOW_TOKENS, max(wanted, default=0)))
        if num_steps == 0 and not new:
            return None
        if self._quantized is not None:
            self._quantized.update()
        store, step = self._memory()
        filtered = any(map(_is_filtered, rows))
        own = Round(len(outdated) + bool(entries), num_steps, len(rows), filtered)
        common = self._begin_round(own, step, shared=shared)
        self._arrange(step, rows, num_kept=len(kept) if last is not None else 0)
        replay = step.prepare(len(rows), store, variant=_variant(common, shared=shared))
        self._draw_uniforms(step, len(rows))
        for again in outdated:
            self._fill(again, store)
        self._is_outdated = False
        if entries:
            self._prefill(entries, step, store=store, first_row=len(kept))
        if self._rounds is not None:
            self._rounds.compute_passes(common.num_passes - own.num_passes)
        for _ in range(common.num_steps):
            replay()
        launched = [min(common.num_steps, row.num_remaining) for row in kept]
        launched += [min(common.num_steps + 1, row.num_remaining) for row in new]
        return self._read(step, rows, launched=launched)

    def _shares_pages(self, rows: Sequence[Running]) -> bool:
        """Return whether steps read enough less if tiles of rows read common pages once."""
        shape, page_tokens = self._shape, self._page_tokens
        per_tile = rows_of_tile(self._decoder, page_tokens=page_tokens)
        layer_bytes = shape.bytes_per_token * page_tokens // shape.num_layers
        saved = num_saved_pages(rows, rows_of_tile=per_tile)
        return self._least_shared_bytes <= saved * layer_bytes

    def _begin_round(self, own: Round, step: DecodeStep, *, shared: bool) -> Round:
        """Return what all processes that divide experts do, for a number of rows that is captured.

        All of them capture the step again if one of them has to.
        """
        if self._rounds is None:
            size = next(size for size in self._sizes if size >= own.num_rows)
            return replace(own, num_rows=size)

        def is_captured(common: Round) -> bool:
            return step.is_captured(_variant(common, shared=shared))

        common, captures = self._rounds.begin(own, is_captured=is_captured)
        if captures:
            step.forget(_variant(common, shared=shared))
        return common

    def _fits(self) -> bool:
        """Return whether pages and buffers are large enough for all requests."""
        scheduler, store, step = self._scheduler, self._store, self._step
        return (
            store is not None
            and step is not None
            and store.num_pages >= scheduler.wanted_pages
            and step.table_RN.shape[1] >= scheduler.longest_pages
        )

    def _memory(self) -> tuple[PageStore, DecodeStep]:
        """Return pages and buffers that are large enough for all requests."""
        table_pages = self._scheduler.longest_pages
        if self._store is None:
            self._store = PageStore(
                self._shape, self._scheduler.wanted_pages, page_tokens=self._page_tokens
            )
        if self._step is None or self._step.table_RN.shape[1] < table_pages:
            self._step = None
            config = self._config
            window = Window.allocate(
                config.max_num_seqs,
                WINDOW_TOKENS + 1,
                eos_ids=config.eos_ids,
                device=self._device,
                routes_LX=routes_like(self._decoder) if config.records_routes else None,
            )
            size = (config.max_num_seqs, table_pages)
            self._step = DecodeStep(
                self._decoder,
                self._make_capturer(),
                quantized=self._quantized,
                table_RN=torch.zeros(size, dtype=torch.int32, device=self._device),
                window=window,
                num_multiprocessors=self._num_multiprocessors,
                page_tokens=self._page_tokens,
            )
        return self._store, self._step

    def _arrange(self, step: DecodeStep, rows: Sequence[Running], *, num_kept: int) -> None:
        """Write the state and the page tables of all rows, in order. The first ``num_kept`` were in
        the last window, and only the device knows their positions.
        """
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
                self._config.seed,
                [row.sample_id for row in new],
                first_indices=[row.first_index for row in new],
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
        """Compute the runs of one pass, fill their pages, return the last hidden states (P, D)."""
        attention = PrefillAttention(
            [entry.run for entry in entries],
            store,
            make_attention=self._decoder.operators.packed_attention,
        )
        packed, recorder = attention.packed, recorder_of(self._experts)
        token_T, position_T, view = packed.token_T, packed.position_T, packed.view
        if self._quantized is not None and view is None:
            h_TD = self._quantized(token_T, position_T, attention)
        else:
            h_TD = self._decoder(token_T, position_T, attention, view=view, routing=recorder)
        if recorder is not None:
            routes_TLX = self._copied(recorder.routes())
            self._passes.append(_PassRoutes(tuple(entries), routes_TLX))
        store.copy_tails([copy for entry in entries for copy in entry.tail_copies])
        self.num_prefilled_tokens += len(h_TD)
        return h_TD.index_select(0, packed.last_S)

    def _read(self, step: DecodeStep, rows: Sequence[Running], *, launched: list[int]) -> _Flight:
        """Queue the copies of the window's results to the host."""
        num_rows = len(rows)
        for row, count in zip(rows, launched, strict=True):
            row.num_launched += count
        window = step.window.rows(slice(num_rows))
        numbers = self._copied(step.state.numbers[:num_rows])
        token_BW, logp_BW = self._copied(window.token_BW), self._copied(window.logp_BW)
        routes_BWLX = None if window.routes_BWLX is None else self._copied(window.routes_BWLX)
        passes, self._passes = tuple(self._passes), []
        event = None
        if self._pins:
            event = torch.Event(self._device)
            event.record()
        return _Flight(
            tuple(rows),
            tuple(launched),
            numbers,
            token_BW,
            logp_BW,
            routes_BWLX,
            passes,
            event,
        )

    def _copied(self, source: Tensor) -> Tensor:
        """Queue a copy to the host, and return it."""
        copy = torch.empty_like(source, device="cpu", pin_memory=self._pins)
        return copy.copy_(source, non_blocking=True)

    def _collect(self, flight: _Flight) -> list[Completion]:
        """Read a window. Return the completions of the rows that ended in it."""
        if flight.event is not None:
            flight.event.synchronize()
        counts = flight.numbers[:, RowState.COUNT].tolist()
        active = flight.numbers[:, RowState.ACTIVE].tolist()
        tokens, log_probs = flight.token_BW.tolist(), flight.logp_BW.tolist()
        for one in flight.passes:
            one.record()
        finished: list[Running] = []
        for index, row in enumerate(flight.rows):
            row.num_launched -= flight.num_launched[index]
            if not row.pages:
                continue  # it had ended in the window before
            count = counts[index]
            if flight.routes_BWLX is not None:
                newest = len(row.prompt_ids) + len(row.token_ids) - 1
                row.routes.record(flight.routes_BWLX[index, :count].numpy(), start=newest)
            row.extend(
                tokens[index][:count], log_probs[index][:count], version=self._weights_version
            )
            if not active[index]:
                finished.append(row)
        self.num_decoded_tokens += sum(counts)
        self._scheduler.remove(finished)
        return [self._completion(row) for row in finished]

    def _completion(self, row: Running) -> Completion:
        return complete(
            row.sample_id,
            row.token_ids,
            log_probs=row.log_probs,
            eos_ids=() if row.sampling.ignore_eos else self._config.eos_ids,
            versions=row.version_starts,
            routes=None if self._experts is None else row.routes.joined(),
        )


def _numbers(row: Running) -> tuple[int, ...]:
    """Return the fields of ``RowState.numbers``, with 0 for the stream's key.

    An entering row's index is that of its last context token. The first draw advances it.
    """
    newest = row.token_ids[-1] if row.token_ids else 0
    ignore_eos, top_k = int(row.sampling.ignore_eos), max(0, row.sampling.top_k)
    index, drawn, shift = row.num_tokens - 1, len(row.token_ids), total_shift(row.pictures)
    common = row.num_common_pages
    return (newest, index, row.num_remaining, 1, 0, ignore_eos, top_k, 0, drawn, shift, common)


def _variant(common: Round, *, shared: bool) -> Variant:
    return Variant(common.num_rows, common.filtered, shared)


def _is_filtered(row: Running) -> bool:
    return row.sampling.top_k > 0 or row.sampling.top_p < 1
