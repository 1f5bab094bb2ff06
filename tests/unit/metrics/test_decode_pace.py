# SPDX-License-Identifier: Apache-2.0
"""What a step of decoding takes, from when the sequences of a batch end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tandem.metrics.decode_pace import DecodePace, PaceRecorder, fit_pace
from tandem.types import GenerationRequest, SamplingParams

PACE = DecodePace(fixed_s=1.2e-3, per_sequence_s=4e-6)
PROMPT_TOKENS = 100
TOKEN_S = 3e-9


def lengths_with_a_tail(count: int) -> list[int]:
    draws = np.random.default_rng(0).exponential(200.0, count)
    return np.clip(draws, 1, 1600).astype(int).tolist()


def ends(
    lengths: Sequence[int], pace: DecodePace, *, token_s: float = 0.0, prompts_s: float = 0.3
) -> list[tuple[int, float]]:
    """Step by step, as one engine goes that has all of the batch; ``token_s`` for each token in the
    cache.
    """
    found: list[tuple[int, float]] = []
    now_s = prompts_s
    for token in range(1, max(lengths) + 1):
        num_running = sum(length >= token for length in lengths)
        now_s += pace.step_s(num_running) + token_s * num_running * (PROMPT_TOKENS + token)
        found += [(length, now_s) for length in lengths if length == token]
    return found


def fit(found: Sequence[tuple[int, float]], num_engines: int = 1) -> DecodePace | None:
    return fit_pace(found, prompt_tokens=PROMPT_TOKENS, num_engines=num_engines)


@pytest.mark.parametrize("pace", [PACE, DecodePace(0.0, 4e-6), DecodePace(1.2e-3, 0.0)])
def test_both_parts_are_found_whatever_happens_before(pace: DecodePace) -> None:
    """Even if the clock began late."""
    found = fit(ends(lengths_with_a_tail(300), pace, prompts_s=-0.1))
    assert found is not None
    assert found.fixed_s == pytest.approx(pace.fixed_s, rel=1e-6, abs=1e-9)
    assert found.per_sequence_s == pytest.approx(pace.per_sequence_s, rel=1e-6, abs=1e-12)


def test_what_prompts_take_is_spread_over_the_steps_of_all_sequences() -> None:
    lengths = lengths_with_a_tail(300)
    found = fit(ends(lengths, PACE, prompts_s=0.3))
    assert found is not None
    assert found.fixed_s == pytest.approx(PACE.fixed_s, rel=1e-6)
    per_sequence_s = PACE.per_sequence_s + 0.3 / sum(lengths)
    assert found.per_sequence_s == pytest.approx(per_sequence_s, rel=1e-6)


def test_long_batches_are_fitted_as_well() -> None:
    """4000 sequences of up to 30000 tokens: sums of cached tokens are 10^11."""
    lengths = np.sort(np.clip(np.random.default_rng(0).exponential(8000.0, 4000), 1, 30000))
    steps = np.arange(1, 30001)
    num_left = len(lengths) - np.searchsorted(lengths.astype(int), steps)
    cached = num_left * (PROMPT_TOKENS + steps)
    passed_s = 5.0 + np.cumsum(PACE.fixed_s + PACE.per_sequence_s * num_left + TOKEN_S * cached)
    found = fit([(length, passed_s[length - 1]) for length in lengths.astype(int).tolist()])
    assert found is not None
    assert found.fixed_s == pytest.approx(PACE.fixed_s, rel=1e-4)
    whole_s = found.fixed_s * lengths.astype(int).max() + found.per_sequence_s * num_left.sum()
    assert whole_s == pytest.approx(passed_s[lengths.astype(int).max() - 1], rel=1e-4)


def test_the_cached_tokens_of_the_mean_step_count_with_each_sequence() -> None:
    """Which are few while all sequences run, and many for the last ones."""
    lengths = lengths_with_a_tail(300)
    found = fit(ends(lengths, PACE, token_s=TOKEN_S, prompts_s=0.0))
    steps = [token for length in lengths for token in range(1, length + 1)]
    mean_cached = PROMPT_TOKENS + sum(steps) / len(steps)
    assert found is not None
    assert found.fixed_s == pytest.approx(PACE.fixed_s, rel=1e-6)
    per_sequence_s = PACE.per_sequence_s + TOKEN_S * mean_cached
    assert found.per_sequence_s == pytest.approx(per_sequence_s, rel=1e-6)


def test_engines_that_share_a_batch_have_about_equal_parts_of_it() -> None:
    lengths = lengths_with_a_tail(1200)
    halves = (ends(half, PACE, prompts_s=0.0) for half in (lengths[::2], lengths[1::2]))
    found = fit([end for half in halves for end in half], num_engines=2)
    assert found is not None
    assert found.step_s(600) == pytest.approx(PACE.step_s(600), rel=0.05)
    assert found.step_s(10) == pytest.approx(PACE.step_s(10), rel=0.05)


def test_no_part_is_below_0_and_the_whole_is_kept() -> None:
    """Steps that are a little shorter with more sequences."""
    lengths = lengths_with_a_tail(300)
    batch = ends(lengths, DecodePace(2e-3, -1e-6), prompts_s=0.0)
    found = fit(batch)
    assert found is not None
    assert found.fixed_s == pytest.approx(2e-3, rel=0.1)
    assert 0 <= found.per_sequence_s < 1e-7
    whole_s = found.fixed_s * max(lengths) + found.per_sequence_s * sum(lengths)
    assert whole_s == pytest.approx(max(end_s for _, end_s in batch), rel=0.05)


@pytest.mark.parametrize(
    "lengths",
    [[], [0, 0], [50] * 20, list(range(40, 60)), [1, 1, 10], [50] * 19 + [200], [10, 20, 90] * 9],
)
def test_lengths_that_differ_little_tell_nothing(lengths: list[int]) -> None:
    assert fit([(length, 0.01 * length) for length in lengths]) is None


def test_ends_that_follow_from_something_else_tell_nothing() -> None:
    lengths = lengths_with_a_tail(300)
    together = [(length, 5.0) for length in lengths]
    at_random = np.random.default_rng(0).uniform(1.0, 5.0, len(lengths)).tolist()
    backwards = [(length, 5.0 - 0.001 * length) for length in lengths]
    for batch in (together, list(zip(lengths, at_random, strict=True)), backwards):
        assert fit(batch) is None


def requests(count: int) -> list[GenerationRequest]:
    """One sequence each, the first of ``PROMPT_TOKENS`` tokens and so the mean of the others."""
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1600)
    sizes = [PROMPT_TOKENS] + [PROMPT_TOKENS - 10, PROMPT_TOKENS + 10] * (count // 2)
    return [GenerationRequest((i,), (1,) * sizes[i], sampling) for i in range(count)]


class Clock:
    """Stands still until it is told."""

    now_s = 5.0

    def __call__(self) -> float:
        return self.now_s


def record(recorder: PaceRecorder, clock: Clock, batch: list[tuple[int, float]]) -> None:
    begin_s = clock.now_s
    for length, end_s in batch:
        clock.now_s = begin_s + end_s
        recorder.end(length)


def test_the_largest_batch_that_began_together_counts_once() -> None:
    clock = Clock()
    recorder = PaceRecorder(clock, num_engines=1, num_rows=301)
    for lengths, pace in (
        (lengths_with_a_tail(301), PACE),
        (lengths_with_a_tail(21), DecodePace(1.0, 1.0)),
    ):
        recorder.begin(requests(len(lengths)), is_alone=True)
        record(recorder, clock, ends(lengths, pace, token_s=TOKEN_S))
    found = recorder.take()
    whole = fit(ends(lengths_with_a_tail(301), PACE, token_s=TOKEN_S))
    assert whole is not None
    assert found["perf/decode_step_s/fixed"] == pytest.approx(whole.fixed_s)
    assert found["perf/decode_step_s/per_sequence"] == pytest.approx(whole.per_sequence_s)
    assert recorder.take() == {}


@pytest.mark.parametrize("case", ["joined by others", "more than rows", "no rows", "under way"])
def test_what_did_not_run_side_by_side_from_its_begin_is_left_out(case: str) -> None:
    clock = Clock()
    num_rows = {"more than rows": 299, "no rows": None}.get(case, 400)
    recorder = PaceRecorder(clock, num_engines=1, num_rows=num_rows)
    batch = ends(lengths_with_a_tail(300), PACE)
    recorder.begin(requests(300), is_alone=True)
    if case == "under way":
        batch = batch[:-1]
    record(recorder, clock, batch[:100])
    if case == "joined by others":
        recorder.begin(requests(10), is_alone=False)
    record(recorder, clock, batch[100:])
    assert recorder.take() == {}
