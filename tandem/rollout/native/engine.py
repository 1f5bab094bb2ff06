# SPDX-License-Identifier: Apache-2.0
"""The dense rollout engine: continuous batching over the trainer's decoder, in its storage.

Each prompt is prefilled once for all its samples, and again after a weight update. Finished
sequences leave the batch and waiting ones enter. Tokens depend on weights, prompt, sampling
parameters and (seed, sample id), up to rounding of logits, and not on the batch. One process, one
device, plain torch operations: no graphs, no paging, no preemption.

Shapes: B running rows, n new rows, P prompts, T packed tokens, D hidden, V vocabulary, J columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.api import Capacity, EngineFacts
from tandem.models.decoder import Decoder
from tandem.models.routing import RecordedRoutes
from tandem.pictures import total_shift
from tandem.rollout.completion import complete
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.lock_step import LockStep
from tandem.rollout.native.attention import DecodeAttention, PrefillAttention
from tandem.rollout.native.cache import NUM_UNIFORMS, RowCache, TokenStates
from tandem.rollout.native.scheduler import Admission, Removal, Row, Scheduler
from tandem.rollout.native.shelf import Shelf
from tandem.rollout.packing import cost_of, in_passes, pack
from tandem.rollout.recording import recorder_of, routes_like
from tandem.rollout.resting import Resting
from tandem.rollout.sampler import Draw, DrawRule, draw_tokens
from tandem.rollout.settings import CacheShape, NativeRolloutConfig, Substitute
from tandem.types import Completion, GenerationRequest, TokenIds

_SMALL_CACHE_BYTES = 64 * 2**20
"""A cache of this size is allocated at once and kept when idle. A larger one grows and is freed."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The states of P packed prompts, the slice of each, and their next-token logits."""

    states: TokenStates
    tokens: tuple[slice, ...]
    logits_PV: Tensor

    def part(self, index: int) -> _Prefill:
        """Copy one prompt; the memory of the others can then be freed."""
        tokens = self.tokens[index]
        alone = slice(0, tokens.stop - tokens.start)
        return _Prefill(self.states.part(tokens), (alone,), self.logits_PV[index, None].clone())


class NativeRolloutEngine(Resting):
    """An ``api.RolloutEngine`` on one device. It reads the decoder and never copies it."""

    def __init__(
        self,
        decoder: Decoder,
        config: NativeRolloutConfig,
        *,
        substitute: Substitute | None = None,
        lock_step: LockStep | None = None,
    ) -> None:
        """Build the engine. ``substitute`` computes in place of ``decoder``, if given. With
        ``lock_step``, processes that divide its experts compute together.
        """
        shape = CacheShape.of(decoder)
        self._decoder = decoder
        self._substitute = substitute
        self._lock_step = lock_step
        self._config = config
        self._device = shape.device
        self._experts = decoder.config.experts if config.records_routes else None
        self._cache = RowCache(shape, routes_like(decoder) if config.records_routes else None)
        max_tokens = config.max_cache_bytes // shape.bytes_per_token
        self._scheduler = Scheduler(config.limits, max_cache_tokens=max_tokens)
        self._shelf = Shelf()
        self._max_tokens = max_tokens
        self.facts = EngineFacts(
            shares_weights=True,
            draws_by_key=True,
            stops_within_sequences=True,
            keeps_cache=config.keeps_cache,
        )
        self.capacity = Capacity(config.max_num_seqs, max_tokens)
        self._eos = torch.tensor(config.eos_ids, device=self._device)
        self._attention: DecodeAttention | None = None
        self._carried: _Prefill | None = None
        self._uniform_start = 0
        self._is_outdated = False
        self.num_prefilled_tokens = 0
        self.num_decoded_tokens = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed. Raise UserError if one is too long for the model."""
        for request in requests:
            longest = len(request.prompt_ids) + request.sampling.max_new_tokens
            self._decoder.rotary.require_length(longest)
        self._scheduler.add(requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Give up the states of samples that get no further turn."""
        self._shelf.forget(sample_ids)

    def sleep(self) -> bool:
        """Free the cache, unless there is something to generate. Return whether it was freed."""
        if self._scheduler.has_work:
            return False
        self._cache.release()
        self._shelf.clear()
        if self._substitute is not None:
            self._substitute.free()
        return True

    def sink(self) -> None:
        """Return None: the decoder's own weights change."""

    def set_weights_version(self, version: int) -> bool:
        """Tag later tokens with ``version``. The next step recomputes the cache, unless kept."""
        self._is_outdated |= self._scheduler.set_weights_version(version)
        if self._substitute is not None:
            self._substitute.outdate()
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return how many tokens were prefilled, decoded, and kept from earlier turns."""
        return {
            "num_kept_tokens": self._shelf.num_reused,
            "num_prefilled_tokens": self.num_prefilled_tokens,
            "num_decoded_tokens": self.num_decoded_tokens,
        }

    @torch.inference_mode()
    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes; see ``api.Rollout``."""
        if self._substitute is not None:
            self._substitute.update()
        if self._is_outdated:
            self._update_cache()
        completions: list[Completion] = []
        steps = repeat(None) if max_steps is None else range(max_steps)
        for _ in steps:
            if completions or not self._scheduler.has_work:
                break
            if self._lock_step is not None and not self._lock_step.may_step():
                break
            completions = self._admit() or self._decode()
        if self._lock_step is not None:
            self._lock_step.leave(stops=bool(completions) or self._scheduler.has_work)
        if not self._scheduler.has_work and self._cache.num_bytes > _SMALL_CACHE_BYTES:
            self._cache.release()
        return completions

    def _admit(self) -> list[Completion]:
        completions: list[Completion] = []
        while (admission := self._scheduler.admit()) is not None:
            completions += self._enter(admission)
        return completions

    def _enter(self, admission: Admission) -> list[Completion]:
        """Fill the new rows and draw their first tokens."""
        prefill = self._prefill_entering(admission) if admission.prompts else self._carried
        assert prefill is not None, "an admission without prompts follows one with prompts"
        scheduler, cache = self._scheduler, self._cache
        first_row = len(scheduler.rows) - len(admission.rows)
        self._make_room(live_rows=first_row)
        row = first_row
        for tokens, num_rows in zip(prefill.tokens, admission.num_rows, strict=True):
            rows = slice(row, row + num_rows)
            cache.write(rows, prefill.states, tokens=tokens, column=scheduler.column)
            row += num_rows
        self._write_facts(first_row, admission.rows)
        self._draw_uniforms()
        self._attention = None
        self._carry(prefill, admission)
        num_rows_P = torch.tensor(admission.num_rows, device=self._device)
        return self._sample(prefill.logits_PV.repeat_interleave(num_rows_P, 0), first_row)

    def _prefill_entering(self, admission: Admission) -> _Prefill:
        """Compute the prompts of new rows; of further turns only what their samples lack."""
        kept, prompts = self._shelf.take(admission), admission.prompts
        if not kept:
            return self._prefill(prompts)
        fresh = [index for index in range(len(prompts)) if index not in kept]
        parts = dict(zip(kept, self._go_on([prompts[i] for i in kept], kept), strict=True))
        if fresh:
            computed = self._prefill([prompts[index] for index in fresh])
            parts |= {index: computed.part(place) for place, index in enumerate(fresh)}
        ordered = [parts[index] for index in range(len(prompts))]
        states = TokenStates.join([part.states for part in ordered])
        logits_PV = torch.cat([part.logits_PV for part in ordered])
        return _Prefill(states, _places(prompts), logits_PV)

    def _go_on(
        self, prompts: Sequence[TokenIds], kept: Mapping[int, TokenStates]
    ) -> list[_Prefill]:
        """Compute the ends of prompts whose beginnings ``kept`` has, in its order."""
        before = list(kept.values())
        starts = [states.num_tokens for states in before]
        runs = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
        prefix_starts = [0, *accumulate(starts)][:-1]
        packed = pack(runs, starts, prefix_starts=prefix_starts, device=self._device)
        attention = PrefillAttention(packed, TokenStates.join(before))
        h_PD = self._compute(attention).index_select(0, packed.last_S)
        logits_PV = F.linear(h_PD, self._decoder.lm_head_weight)
        after = attention.states()
        return [
            _Prefill(
                TokenStates.join([states, after.part(place)]),
                (slice(0, len(prompt)),),
                logits_PV[index, None],
            )
            for index, (prompt, states, place) in enumerate(
                zip(prompts, before, _places(runs), strict=True)
            )
        ]

    def _prefill(self, prompts: Sequence[TokenIds]) -> _Prefill:
        zeros = [0] * len(prompts)
        pictures = self._scheduler.pictures_of(prompts)
        packed = pack(prompts, zeros, prefix_starts=zeros, device=self._device, pictures=pictures)
        attention, recorder = PrefillAttention(packed), recorder_of(self._experts)
        h_PD = self._compute(attention, recorder).index_select(0, packed.last_S)
        logits_PV = F.linear(h_PD, self._decoder.lm_head_weight)
        states = attention.states()
        if recorder is not None:
            states = replace(states, routes_TLX=recorder.routes())
        return _Prefill(states, _places(prompts), logits_PV)

    def _compute(
        self, attention: PrefillAttention, recorder: RecordedRoutes | None = None
    ) -> Tensor:
        """Return the hidden states (T, D) of the tokens that ``attention`` was packed for."""
        packed = attention.packed
        if self._lock_step is not None:
            self._lock_step.begin_pass()
        self.num_prefilled_tokens += len(packed.token_T)
        if self._substitute is not None:
            return self._substitute(packed.token_T, packed.position_T, attention)
        view = packed.view
        return self._decoder(
            packed.token_T, packed.position_T, attention, view=view, routing=recorder
        )

    def _update_cache(self) -> None:
        """Recompute cached keys and values after a weight update, unless the cache is kept."""
        self._is_outdated = False
        if not self._config.keeps_cache:
            self._shelf.clear()
            self._recompute()
        elif (head := self._scheduler.prefilled_head) is not None:
            self._carried = self._prefill([head])

    def _recompute(self) -> None:
        """Recompute the keys and values of all rows: each prompt once, then the responses.

        The newest token of each row is left out, because the next decode step computes it. Recorded
        routes stay those of the weights that drew the tokens behind them.
        """
        scheduler, max_tokens = self._scheduler, self._config.max_num_batched_tokens
        rows_of, responses = scheduler.rows_by_prompt(), self._responses()
        prompts = list(rows_of)
        self._carried = None
        for chosen in in_passes([len(prompt) for prompt in prompts], max_tokens):
            prefill = self._prefill(prompts[chosen])
            for index, prompt in enumerate(prompts[chosen]):
                for row in rows_of[prompt]:
                    first, tokens = scheduler.rows[row].first, prefill.tokens[index]
                    states = replace(prefill.states, routes_TLX=None)
                    self._cache.write(slice(row, row + 1), states, tokens=tokens, column=first)
                if prompt == scheduler.prefilled_head:
                    self._carried = prefill.part(index)
        answered = [row for rows in rows_of.values() for row in rows if responses[row]]
        costs = [
            cost_of(len(responses[row]), len(scheduler.rows[row].prompt_ids)) for row in answered
        ]
        for chosen in in_passes(costs, max_tokens):
            self._extend({row: responses[row] for row in answered[chosen]})

    def _extend(self, responses: dict[int, list[int]]) -> None:
        """Compute the responses of some rows, whose prompts are in the cache."""
        rows, cache = self._scheduler.rows, self._cache
        source = {rows[row].prompt_ids: row for row in responses}  # one row per prompt
        prompts = dict(zip(source, _places(list(source)), strict=True))
        prefix = cache.read(
            [(row, range(rows[row].start, rows[row].first)) for row in source.values()]
        )
        runs = list(responses.values())
        before = [rows[row].prompt_ids for row in responses]
        packed = pack(
            runs,
            [len(prompt) for prompt in before],
            prefix_starts=[prompts[prompt].start for prompt in before],
            device=self._device,
            shifts=[total_shift(rows[row].pictures) for row in responses],
        )
        attention = PrefillAttention(packed, prefix)
        self._compute(attention)
        states, column = attention.states(), self._scheduler.column
        for row, tokens in zip(responses, _places(runs), strict=True):
            cache.write(slice(row, row + 1), states, tokens=tokens, column=column)

    def _responses(self) -> list[list[int]]:
        """Return the response of each row without its newest token."""
        rows, column = self._scheduler.rows, self._scheduler.column
        first = min((row.first for row in rows), default=column)
        window = self._cache.index(range(first, column))
        tokens = self._cache.tokens_RC[: len(rows), window].tolist()
        return [ids[row.first - first :] for row, ids in zip(rows, tokens, strict=True)]

    def _carry(self, prefill: _Prefill, admission: Admission) -> None:
        """Keep the last prefill while samples of its prompt wait for rows."""
        if self._scheduler.prefilled_head is None:
            self._carried = None
        elif admission.prompts:
            self._carried = prefill.part(-1)

    def _make_room(self, *, live_rows: int) -> None:
        """Reserve room for the rows and their next column, and spare columns if the cache grows."""
        scheduler = self._scheduler
        start, column, num_rows = scheduler.oldest_column, scheduler.column, scheduler.wanted_rows
        # Without live rows there is nothing to move, and the window can start anew.
        if live_rows and self._cache.has_room(len(scheduler.rows), range(start, column + 2)):
            return
        small = _SMALL_CACHE_BYTES // (num_rows * self._cache.shape.bytes_per_token)
        spare = max(column - start, small)
        stop = max(column + 1, min(scheduler.last_column, column + spare)) + 1
        self._shelf.trim(self._max_tokens - num_rows * (stop - start))
        self._cache.reserve(num_rows, range(start, stop), live_rows=live_rows)
        self._attention = None

    def _write_facts(self, first_row: int, rows: Sequence[Row]) -> None:
        columns = torch.tensor([[row.start for row in rows], [row.first for row in rows]])
        keys_n = stream_keys(
            self._config.seed,
            [row.sample_id for row in rows],
            first_indices=[row.first_index for row in rows],
            device=self._device,
        )
        facts_4n = self._cache.facts_4R[:, first_row : first_row + len(rows)]
        facts_4n[:2] = columns.to(self._device)
        facts_4n[2] = keys_n
        shifts = [total_shift(row.pictures) for row in rows]
        facts_4n[3] = torch.tensor(shifts).to(self._device)

    def _draw_uniforms(self) -> None:
        """Draw the random numbers of all rows for the current column and the next ones."""
        num_rows, column = len(self._scheduler.rows), self._scheduler.column
        facts_4B = self._cache.facts_4R[:, :num_rows]
        columns_J = torch.arange(column, column + NUM_UNIFORMS, device=self._device)
        self._cache.uniform_RJ[:num_rows] = uniforms(facts_4B[2], columns_J - facts_4B[1, :, None])
        self._uniform_start = column

    def _decode(self) -> list[Completion]:
        """Compute one token for every running row."""
        scheduler, cache = self._scheduler, self._cache
        num_rows, column = len(scheduler.rows), scheduler.column
        if column + 1 >= cache.stop_column:
            self._make_room(live_rows=num_rows)
        attention = self._attention = self._attention or self._new_attention()
        attention.column = column
        token_B = cache.tokens_RC[:num_rows, column - cache.first_column]
        position_B = column - cache.facts_4R[0, :num_rows] + cache.facts_4R[3, :num_rows]
        if self._lock_step is not None:
            self._lock_step.begin_pass()
        if self._substitute is not None:
            h_BD = self._substitute(token_B, position_B, attention)
        else:
            recorder = recorder_of(self._experts)
            h_BD = self._decoder(token_B, position_B, attention, routing=recorder)
            if recorder is not None:
                cache.routes_RCLX[:num_rows, column - cache.first_column] = recorder.routes()
        logits_BV = F.linear(h_BD, self._decoder.lm_head_weight)
        scheduler.tick()
        if scheduler.column >= self._uniform_start + NUM_UNIFORMS:
            self._draw_uniforms()
        self.num_decoded_tokens += num_rows
        return self._sample(logits_BV, 0)

    def _new_attention(self) -> DecodeAttention:
        rows, first_column = self._scheduler.rows, self._scheduler.oldest_column
        masked = any([row.start != first_column for row in rows])
        return DecodeAttention(self._cache, len(rows), first_column=first_column, masked=masked)

    def _sample(self, logits_BV: Tensor, first_row: int) -> list[Completion]:
        """Draw the tokens of the current column, and collect the sequences that they end."""
        scheduler, cache = self._scheduler, self._cache
        rows, column = slice(first_row, first_row + len(logits_BV)), scheduler.column
        uniform_B = cache.uniform_RJ[rows, column - self._uniform_start]
        draw = _draw(logits_BV, uniform_B, rows=scheduler.rows[first_row:], rules=scheduler.rules)
        index = column - cache.first_column
        cache.tokens_RC[rows, index] = draw.token_B
        cache.logp_RC[rows, index] = draw.logp_B
        stopped: list[int] = []
        if scheduler.stops_at_eos:
            found = torch.isin(draw.token_B, self._eos).nonzero()
            stopped = [first_row + row for row in found[:, 0].tolist()]
        ended = scheduler.ended(stopped)
        return self._collect(ended) if ended else []

    def _collect(self, ended: list[int]) -> list[Completion]:
        """Remove the rows ``ended`` from the batch, and return their completions."""
        cache = self._cache
        columns = range(self._scheduler.oldest_column, self._scheduler.column + 1)
        removal = self._scheduler.remove(ended)
        first = min([row.first for row in removal.rows])
        index = torch.tensor(ended, device=self._device)
        window = cache.index(range(first, columns.stop))
        token_ids = cache.tokens_RC[:, window].index_select(0, index).tolist()
        log_probs = cache.logp_RC[:, window].index_select(0, index).tolist()
        self._keep(ended, removal, responses=token_ids, first=first)
        recorded = [None] * len(ended)
        if self._experts is not None:
            spans = [range(row.start, columns.stop - 1) for row in removal.rows]
            recorded = cache.routes_of(ended, spans)
        cache.move_rows(removal.sources, removal.targets, columns=columns)
        self._attention = None
        finished = zip(removal.rows, token_ids, log_probs, recorded, strict=True)
        eos_ids = self._config.eos_ids
        return [
            _completion(row, ids, log_probs=logp, first=first, eos_ids=eos_ids, routes=routes)
            for row, ids, logp, routes in finished
        ]

    def _keep(
        self, ended: list[int], removal: Removal, *, responses: list[list[int]], first: int
    ) -> None:
        """Put the states of ended turns on the shelf; their newest tokens have none yet.

        Args:
            responses: the tokens of each removed row from column ``first`` on.
        """
        if not self._config.keeps_turns or self._experts is not None:  # the shelf has no routes
            return
        column = self._scheduler.column
        for index, row, ids in zip(ended, removal.rows, responses, strict=True):
            if row.may_continue:
                drawn = ids[row.first - first : column - first]
                states = self._cache.read([(index, range(row.start, column))])
                self._shelf.put(row.sample_id, (*row.prompt_ids, *drawn), states=states)
        allocated = self._cache.num_bytes // self._cache.shape.bytes_per_token
        self._shelf.trim(self._max_tokens - allocated)


def _draw(
    logits_BV: Tensor, uniform_B: Tensor, *, rows: Sequence[Row], rules: Sequence[DrawRule]
) -> Draw:
    """Draw under each row's rule. Rows nearly always share one."""
    if len(rules) == 1:
        return draw_tokens(logits_BV, uniform_B, rule=rules[0])
    token_B = torch.empty_like(uniform_B, dtype=torch.int64)
    logp_B = torch.empty_like(uniform_B)
    for rule in rules:
        chosen = [i for i, row in enumerate(rows) if row.rule == rule]
        index = torch.tensor(chosen, dtype=torch.int64, device=logits_BV.device)
        part = draw_tokens(logits_BV[index], uniform_B[index], rule=rule)
        token_B[index], logp_B[index] = part.token_B, part.logp_B
    return Draw(token_B, logp_B)


def _places(runs: Sequence[Sequence[int]]) -> tuple[slice, ...]:
    """Return the slice of each run when all are packed."""
    stops = list(accumulate(len(run) for run in runs))
    return tuple(slice(stop - len(run), stop) for run, stop in zip(runs, stops, strict=True))


def _completion(
    row: Row,
    token_ids: list[int],
    *,
    log_probs: list[float],
    first: int,
    eos_ids: tuple[int, ...],
    routes: np.ndarray | None,
) -> Completion:
    """Return the completion of a row, whose tokens are listed from column ``first`` on."""
    starts = ((column - row.first, version) for column, version in row.switches)
    return complete(
        row.sample_id,
        token_ids[row.first - first :],
        log_probs=log_probs[row.first - first :],
        eos_ids=() if row.ignore_eos else eos_ids,
        versions=((0, row.weights_version), *starts),
        routes=routes,
    )
