# SPDX-License-Identifier: Apache-2.0
"""How long a decode step takes by how many sequences it is for, from when the sequences of a batch
end that all began together.

With n sequences of c cached tokens together a step takes ``fixed + a * n + b * c``, and a sequence
ends once it has taken part in as many steps as it has tokens. Engines that share a batch are taken
to have equal parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.types import GenerationRequest

_MIN_LONGEST = 2.0
"""Times the mean length: below it all sequences run nearly to the end, and nothing tells the parts
of a step apart."""


@dataclass(frozen=True, slots=True)
class DecodePace:
    """Seconds of a decode step of one engine.

    ``per_sequence_s`` includes cached tokens, as many as in the mean over the steps of a batch.
    """

    fixed_s: float
    per_sequence_s: float

    def step_s(self, num_sequences: float) -> float:
        """Of a step for so many sequences."""
        return self.fixed_s + self.per_sequence_s * num_sequences


class PaceRecorder:
    """Notes the ends of sequences, and fits what was generated without others coming in between.

    Args:
        clock: seconds, of which only differences are used.
        num_engines: that share the sequences.
        num_rows: sequences that all of them generate at once; a batch of more is not fitted. None
            if that is not so.
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
        """``requests`` are handed to the engines, beside others unless ``is_alone``."""
        counts = [len(request.sample_ids) for request in requests]
        fits = is_alone and sum(counts) <= self._num_rows
        self._num_expected = sum(counts) if fits else 0
        sizes = [len(request.prompt_ids) for request in requests]
        self._prompt_tokens = float(np.average(sizes, weights=counts))
        self._ends = []
        self._begin_s = self._clock()

    def end(self, num_tokens: int) -> None:
        """A sequence of so many tokens has been generated."""
        if self._num_expected == 0:
            return
        self._ends.append((num_tokens, self._clock() - self._begin_s))
        if len(self._ends) == self._num_expected > len(self._largest):
            self._largest, self._largest_prompt_tokens = self._ends, self._prompt_tokens

    def take(self) -> dict[str, float]:
        """Of the largest batch since the last call: ``perf/decode_step_s/fixed`` and
        ``perf/decode_step_s/per_sequence``, empty if they cannot be told.
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
    """Least squares over ``(tokens, seconds after the begin)`` of all sequences of a batch, no part
    below 0; None if lengths differ too little.

    Args:
        prompt_tokens: of the mean sequence.
    """
    lengths = np.maximum([length for length, _ in ends], 1)
    if len(ends) == 0 or lengths.max() < _MIN_LONGEST * lengths.mean():
        return None
    seconds = np.array([end_s for _, end_s in ends])
    steps = np.arange(1, lengths.max() + 1)
    num_left = (len(ends) - np.searchsorted(np.sort(lengths), steps)) / num_engines
    cached = num_left * (prompt_tokens + steps)
    parts = np.cumsum([np.ones(len(steps)), num_left, cached], axis=1)
    fixed_s, sequence_s, token_s = _nonnegative_fit(parts[:, lengths - 1], seconds)
    return DecodePace(fixed_s, sequence_s + token_s * cached.sum() / num_left.sum())


def _nonnegative_fit(parts: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """The factor of each part, beside a constant of any sign; the most negative is left out until
    there is none.
    """
    kept = list(range(len(parts)))
    factors = [0.0] * len(parts)
    while kept:
        columns = np.stack([np.ones(len(values)), *parts[kept]], axis=1)
        found = np.linalg.lstsq(columns, values, rcond=None)[0][1:]
        if found.min() >= 0:
            for index, factor in zip(kept, found.tolist(), strict=True):
                factors[index] = factor
            break
        kept.pop(int(found.argmin()))
    return factors
