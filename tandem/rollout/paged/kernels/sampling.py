# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernels: from logits to the next token of every row, its log-prob and its new state.

The distribution function is inverted in two passes. The first reduces each chunk of the vocabulary
to its maximum and sums; the second picks a chunk with the row's uniform number, then the token
within it. The log-prob is that of the temperature-scaled distribution before top-k and top-p
(greedy: the unscaled one). A row's token depends only on its own logits and number. Top-k and top-p
also keep tokens that tie with the last one kept.

Shapes: B rows, L rows of logits, V vocabulary, C chunks, W tokens of a window.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models.operators import upload
from tandem.rollout.paged.cache import RowState, Window
from tandem.rollout.sampler import Draw, DrawRule, force

CHUNK = 2048
_FILTER_BLOCK = 8192
_FILTER_ROUNDS = 32
_LOWEST = -0x7F800001
"""The ordered value of minus infinity."""


class KernelDraws:
    """Draws one token per row, each by its own rule, as ``sampler.draw_rows`` does but for ties at
    the bound of top-k and top-p, which are all kept.

    What the rules need on the device stays there until other rules are given.
    """

    def __init__(self) -> None:
        self._rules: tuple[DrawRule, ...] | None = None
        self._device: torch.device | None = None

    def __call__(
        self,
        logits_BV: Tensor,
        uniform_B: Tensor,
        *,
        rules: tuple[DrawRule, ...],
        forced: Mapping[int, int],
    ) -> Draw:
        """See ``sampler.DrawRows``."""
        device = logits_BV.device
        if rules is not self._rules or device != self._device:
            self._prepare(rules, device)
        window = Window(
            uniform_B[:, None],
            uniform_B.new_empty((len(rules), 1), dtype=torch.int64),
            uniform_B.new_empty((len(rules), 1)),
            self._no_ids,
        )
        logits_BV = logits_BV.contiguous()  # a padded vocabulary may have been cut off
        draw_next(
            logits_BV,
            RowState(self._numbers.clone(), self._settings),  # a draw changes the numbers
            window=window,
            filtered=self._filtered,
            logits_row_B=self._row_B,
        )
        draw = Draw(window.token_BW[:, 0], window.logp_BW[:, 0])
        force(draw, logits_BV, forced=forced)
        return draw

    def _prepare(self, rules: tuple[DrawRule, ...], device: torch.device) -> None:
        numbers = torch.zeros((len(rules), RowState.NUM_FIELDS), dtype=torch.int64)
        numbers[:, RowState.ACTIVE] = 1
        numbers[:, RowState.TOP_K] = torch.tensor([max(0, rule.top_k) for rule in rules])
        settings = torch.tensor([(rule.temperature, rule.top_p) for rule in rules])
        self._rules, self._device = rules, device
        self._numbers, self._settings = upload(numbers, device), upload(settings, device)
        self._filtered = any(rule.top_k > 0 or rule.top_p < 1 for rule in rules)
        self._row_B = torch.arange(len(rules), dtype=torch.int32, device=device)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=device)


def draw_next(
    logits_LV: Tensor, state: RowState, *, window: Window, filtered: bool, logits_row_B: Tensor
) -> None:
    """Draw one token for each active row and advance its state, all in place.

    Args:
        filtered: whether a row may have top-k or top-p. Otherwise both are ignored.
        logits_row_B: int32, the row of logits that each row draws from.
    """
    num_rows, vocabulary = len(logits_row_B), logits_LV.shape[1]
    chunks = -(-vocabulary // CHUNK)
    stats = torch.empty((num_rows, 3, chunks), dtype=torch.float32, device=logits_LV.device)
    threshold_B = stats.new_full((num_rows,), float("-inf"))
    if filtered:
        _find_thresholds(logits_LV, state, threshold_B=threshold_B, logits_row_B=logits_row_B)
    _reduce[(num_rows, chunks)](
        logits_LV,
        logits_row_B,
        state.settings,
        threshold_B,
        stats,
        vocabulary,
        chunks,
        CHUNK=CHUNK,
        SETTINGS=state.settings.shape[1],
        num_warps=4,
    )
    _draw[(num_rows,)](
        logits_LV,
        logits_row_B,
        state.numbers,
        state.settings,
        threshold_B,
        stats,
        window.uniform_BW,
        window.token_BW,
        window.logp_BW,
        window.eos_ids,
        vocabulary,
        chunks,
        window.uniform_BW.stride(0),
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        FIELDS=state.numbers.shape[1],
        SETTINGS=state.settings.shape[1],
        NUM_EOS=len(window.eos_ids),
        TOKEN=RowState.TOKEN,
        POSITION=RowState.POSITION,
        REMAINING=RowState.REMAINING,
        ACTIVE=RowState.ACTIVE,
        COUNT=RowState.COUNT,
        IGNORE_EOS=RowState.IGNORE_EOS,
        num_warps=4,
    )


def _find_thresholds(
    logits_LV: Tensor, state: RowState, *, threshold_B: Tensor, logits_row_B: Tensor
) -> None:
    """Write the smallest scaled logit that top-k and top-p leave of each row."""
    _threshold[(len(logits_row_B),)](
        logits_LV,
        logits_row_B,
        state.numbers,
        state.settings,
        threshold_B,
        logits_LV.shape[1],
        BLOCK=_FILTER_BLOCK,
        ROUNDS=_FILTER_ROUNDS,
        FIELDS=state.numbers.shape[1],
        SETTINGS=state.settings.shape[1],
        TOP_K=RowState.TOP_K,
        LOWEST=_LOWEST,
        num_warps=8,
    )


@triton.jit
def _scale_of(settings_ptr, row, SETTINGS: tl.constexpr):
    """Return 1 / temperature, or 1 for a greedy row (temperature 0)."""
    temperature = tl.load(settings_ptr + row * SETTINGS)
    return tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0)


@triton.jit
def _reduce(
    logits_ptr,
    logits_row_ptr,
    settings_ptr,
    threshold_ptr,
    stats_ptr,
    vocabulary,
    chunks,
    CHUNK: tl.constexpr,
    SETTINGS: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    source = tl.load(logits_row_ptr + row).to(tl.int64)
    scale = _scale_of(settings_ptr, row, SETTINGS)
    threshold = tl.load(threshold_ptr + row)
    v = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + source * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) * scale
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(x - shift)
    out = stats_ptr + row * 3 * chunks + chunk
    tl.store(out, top)
    tl.store(out + chunks, tl.sum(weight, 0))
    tl.store(out + 2 * chunks, tl.sum(tl.where(x >= threshold, weight, 0.0), 0))


@triton.jit
def _drawn_chunk(stats_ptr, uniform_ptr, place, greedy, chunks, CHUNKS: tl.constexpr):
    """Return the largest logit, the logarithm of the sum of weights, the drawn point within the
    weights that are kept, the chunk that it lies in, and the weight of the chunks before.
    """
    c = tl.arange(0, CHUNKS)
    valid = c < chunks
    stats = stats_ptr + c
    top_c = tl.load(stats, mask=valid, other=float("-inf"))
    sum_c = tl.load(stats + chunks, mask=valid, other=0.0)
    kept_c = tl.load(stats + 2 * chunks, mask=valid, other=0.0)
    top = tl.max(top_c, 0)
    decay_c = tl.exp(top_c - top)
    log_total = top + tl.log(tl.sum(sum_c * decay_c, 0))

    weight_c = kept_c * decay_c
    reached_c = tl.cumsum(weight_c, 0)
    target = tl.load(uniform_ptr + place) * tl.sum(weight_c, 0)
    # Rounding must not select a chunk or a token of weight 0. The first with weight beyond the
    # target is selected, or, if there is none, the last with weight.
    last_c = tl.max(tl.where(weight_c > 0, c, -1), 0)
    beyond_c = tl.where((reached_c > target) & (weight_c > 0), c, CHUNKS)
    chunk = tl.maximum(tl.minimum(tl.min(beyond_c, 0), last_c), 0)
    first_top = tl.min(tl.where(top_c == top, c, CHUNKS), 0)
    chunk = tl.where(greedy, tl.minimum(first_top, chunks - 1), chunk)
    before = tl.sum(tl.where(c < chunk, weight_c, 0.0), 0)
    return top, log_total, target, chunk, before


@triton.jit
def _is_end(token, eos_ptr, NUM_EOS: tl.constexpr):
    """Return whether ``token`` is one of the end tokens."""
    stopped = False
    for n in tl.static_range(NUM_EOS):  # pyright: ignore[reportGeneralTypeIssues]
        stopped = stopped | (token == tl.load(eos_ptr + n))
    return stopped


@triton.jit
def _draw(
    logits_ptr,
    logits_row_ptr,
    numbers_ptr,
    settings_ptr,
    threshold_ptr,
    stats_ptr,
    uniform_ptr,
    token_ptr,
    logp_ptr,
    eos_ptr,
    vocabulary,
    chunks,
    window_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    SETTINGS: tl.constexpr,
    NUM_EOS: tl.constexpr,
    TOKEN: tl.constexpr,
    POSITION: tl.constexpr,
    REMAINING: tl.constexpr,
    ACTIVE: tl.constexpr,
    COUNT: tl.constexpr,
    IGNORE_EOS: tl.constexpr,
):
    row = tl.program_id(0)
    numbers = numbers_ptr + row * FIELDS
    if tl.load(numbers + ACTIVE) == 0:
        return
    count = tl.load(numbers + COUNT)
    source = tl.load(logits_row_ptr + row).to(tl.int64)
    scale = _scale_of(settings_ptr, row, SETTINGS)
    greedy = tl.load(settings_ptr + row * SETTINGS) <= 0
    threshold = tl.load(threshold_ptr + row)

    top, log_total, target, chunk, before = _drawn_chunk(
        stats_ptr + row * 3 * chunks,
        uniform_ptr,
        row * window_stride + count,
        greedy,
        chunks,
        CHUNKS,
    )
    i = tl.arange(0, CHUNK)
    v = chunk * CHUNK + i
    x = tl.load(logits_ptr + source * vocabulary + v, mask=v < vocabulary, other=float("-inf"))
    x = x.to(tl.float32) * scale
    weight = tl.where(x >= threshold, tl.exp(x - top), 0.0)
    reached = before + tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, i, -1), 0)
    beyond = tl.where((reached > target) & (weight > 0), i, CHUNK)
    drawn = tl.maximum(tl.minimum(tl.min(beyond, 0), last), 0)
    likeliest = tl.min(tl.where(x == top, i, CHUNK), 0)
    token = tl.minimum(chunk * CHUNK + tl.where(greedy, likeliest, drawn), vocabulary - 1)
    logit = tl.load(logits_ptr + source * vocabulary + token).to(tl.float32) * scale
    logp = logit - log_total

    stopped = _is_end(token, eos_ptr, NUM_EOS) & (tl.load(numbers + IGNORE_EOS) == 0)
    failed = logp != logp  # noqa: PLR0124
    remaining = tl.load(numbers + REMAINING) - 1
    goes_on = (remaining > 0) & (stopped == 0) & (failed == 0)
    tl.store(token_ptr + row * window_stride + count, token)
    tl.store(logp_ptr + row * window_stride + count, logp)
    tl.store(numbers + TOKEN, token.to(tl.int64))
    tl.store(numbers + POSITION, tl.load(numbers + POSITION) + 1)
    tl.store(numbers + REMAINING, remaining)
    tl.store(numbers + COUNT, count + 1)
    tl.store(numbers + ACTIVE, goes_on.to(tl.int64))


@triton.jit
def _ordered(x):
    """Map fp32 to int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _tail(logits_ptr, bound, top, scale, vocabulary, BLOCK: tl.constexpr):
    """Return the number and weight of scaled logits with an ordered value of at least ``bound``."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * scale
        kept = (_ordered(x) >= bound) & (v < vocabulary)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp(x - top), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _threshold(
    logits_ptr,
    logits_row_ptr,
    numbers_ptr,
    settings_ptr,
    threshold_ptr,
    vocabulary,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    FIELDS: tl.constexpr,
    SETTINGS: tl.constexpr,
    TOP_K: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """Find by bisection the smallest scaled logit that top-k, then top-p of the rest, keep."""
    row = tl.program_id(0)
    top_p = tl.load(settings_ptr + row * SETTINGS + 1)
    top_k = tl.load(numbers_ptr + row * FIELDS + TOP_K)
    limits_k = (top_k > 0) & (top_k < vocabulary)
    if (top_p >= 1) & (limits_k == 0):
        return
    logits = logits_ptr + tl.load(logits_row_ptr + row).to(tl.int64) * vocabulary
    scale = _scale_of(settings_ptr, row, SETTINGS)
    top_block = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocabulary, other=float("-inf")).to(tl.float32) * scale
        top_block = tl.maximum(top_block, x)
    top = tl.max(top_block, 0)
    highest = _ordered(top).to(tl.int64)
    lowest = highest * 0 + LOWEST
    if limits_k:
        low, high = lowest, highest
        for _ in range(ROUNDS):
            middle = (low + high + 1) // 2
            count, _mass = _tail(logits, middle.to(tl.int32), top, scale, vocabulary, BLOCK)
            enough = count >= top_k
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        lowest = low
    if top_p < 1:
        _count, total = _tail(logits, lowest.to(tl.int32), top, scale, vocabulary, BLOCK)
        low, high = lowest, highest
        for _ in range(ROUNDS):
            middle = (low + high + 1) // 2
            _count, mass = _tail(logits, middle.to(tl.int32), top, scale, vocabulary, BLOCK)
            enough = mass >= top_p * total
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        lowest = low
    bits = lowest.to(tl.int32)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    tl.store(threshold_ptr + row, bits.to(tl.float32, bitcast=True))
