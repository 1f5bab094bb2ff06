# SPDX-License-Identifier: Apache-2.0
"""A fit of the time of a decode step as a function of the number of its sequences.

The input is the end time of each sequence in a batch that started together. The model: after the
prefill, a step takes ``fixed + a * n + b * c`` seconds, for n sequences with c cached tokens in
total, and a sequence takes one step per token. Engines are assumed to share a batch evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from tandem.types import GenerationRequest

_MIN_LONGEST = 2.0
"""The minimum ratio of longest to mean length. Below it, all sequences end at nearly the same time,
and the parts of a step cannot be separated."""
_MAX_RESIDUAL = 0.2
"""The maximum ratio of residual to standard deviation of the end times. Above it, another cause
dominates, such as a full cache."""


@dataclass(frozen=True, slots=True)
class DecodePace:
    """The seconds of a decode step of one engine.

    ``per_sequence_s`` includes the cost of the mean number of cached tokens, and the prefill,
    distributed over the steps of the sequences.
    """

    fixed_s: float
    per_sequence_s: float

    def step_s(self, num_sequences: float) -> float:
        return self.fixed_s + self.per_sequence_s * num_sequences


class PaceRecorder:
    """A recorder of end times that fits batches without concurrent work.

    Args:
        clock: the time in seconds; only differences are used.
        num_engines: the number of engines that share the sequences.
        num_rows: the number of sequences that all engines generate at once; larger batches are not
            fitted. None disables fits.
    """

    def __init__(
        self, clock: Callable[[], float], *, num_engines: int, num_rows: int | None
    ) -> None:
        self._clock = clock
        self._num_engines = num_engines
        self._num_rows = num_rows or 0
        self._begin_s = 0.0
        self._ends: list[tuple[int, float]] = []
        self._num_expected = 0
        self._prompt_tokens = 0.0
        self._largest: list[tuple[int, float]] = []
        self._largest_prompt_tokens = 0.0

    def begin(self, requests: Sequence[GenerationRequest], *, is_alone: bool) -> None:
        """Start a batch of ``requests``; ``is_alone``: the engines have no other work."""
        self._ends, self._num_expected = [], 0
        num_sequences = sum(len(request.sample_ids) for request in requests)
        if is_alone and 0 < num_sequences <= self._num_rows:
            self._num_expected = num_sequences
            total = sum(len(r.prompt_ids) * len(r.sample_ids) for r in requests)
            self._prompt_tokens = total / num_sequences
            self._begin_s = self._clock()

    def end(self, num_tokens: int) -> None:
        """Record the end of a sequence of ``num_tokens`` tokens."""
        if self._num_expected == 0:
            return
        self._ends.append((num_tokens, self._clock() - self._begin_s))
        if len(self._ends) == self._num_expected > len(self._largest):
            self._largest, self._largest_prompt_tokens = self._ends, self._prompt_tokens

    def take(self) -> dict[str, float]:
        """Fit the largest batch since the last call; return {} if no fit is possible.

        The metrics are ``perf/decode_step_s/fixed`` and ``perf/decode_step_s/per_sequence``.
        """
        ends, self._largest = self._largest, []
        pace = fit_pace(
            ends, prompt_tokens=self._largest_prompt_tokens, num_engines=self._num_engines
        )
        if pace is None:
            return {}
        return {
            "perf/decode_step_s/fixed": pace.fixed_s,
            "perf/decode_step_s/per_sequence": pace.per_sequence_s,
        }


def fit_pace(
    ends: Sequence[tuple[int, float]], *, prompt_tokens: float, num_engines: int
) -> DecodePace | None:
    """Fit a batch by least squares with nonnegative coefficients.

    Args:
        ends: the number of tokens of each sequence, and the seconds from the start of the batch to
            its end.
        prompt_tokens: the mean number of prompt tokens of a sequence.

    Returns:
        None if the lengths differ too little, or do not explain the end times.
    """
    lengths = np.maximum([length for length, _ in ends], 1)
    if len(ends) == 0 or lengths.max() < _MIN_LONGEST * lengths.mean():
        return None
    seconds = np.array([end_s for _, end_s in ends])
    steps = np.arange(1, lengths.max() + 1)
    num_left = (len(ends) - np.searchsorted(np.sort(lengths), steps)) / num_engines
    cached = num_left * (prompt_tokens + steps)
    parts = np.cumsum([np.ones(len(steps)), num_left, cached], axis=1)
    factors = _nonnegative_fit(parts[:, lengths - 1], seconds)
    if factors is None:
        return None
    prompts_s, fixed_s, sequence_s, token_s = factors
    total = num_left.sum()
    per_sequence_s = sequence_s + (token_s * cached.sum() + max(prompts_s, 0.0)) / total
    return DecodePace(fixed_s, float(per_sequence_s))


def _nonnegative_fit(
    parts: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[float, ...] | None:
    """Fit a constant of any sign and a nonnegative coefficient of each part.

    Try every subset of the parts and return the best fit; None if no subset fits, or if there are
    too few different lengths.
    """
    sizes = parts.max(axis=1)
    scaled = np.stack([np.ones(len(values)), *(parts / sizes[:, None])], axis=1)
    if np.linalg.matrix_rank(scaled) < len(parts) + 1:
        return None
    best, least = None, _MAX_RESIDUAL * float(values.std())
    every = range(1, len(parts) + 1)
    for kept in chain.from_iterable(combinations(every, count) for count in every):
        columns = [0, *kept]
        found = np.linalg.lstsq(scaled[:, columns], values, rcond=None)[0]
        residual = float(np.std(values - scaled[:, columns] @ found))
        if found[1:].min() >= 0 and found[1:].max() > 0 and residual < least:
            best, least = dict(zip(columns, found.tolist(), strict=True)), residual
    if best is None:
        return None
    return best[0], *(best.get(i + 1, 0.0) / float(sizes[i]) for i in range(len(parts)))
