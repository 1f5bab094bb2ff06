# SPDX-License-Identifier: Apache-2.0
"""How long a decode step takes by how many sequences it is for, from when the sequences of a batch
end that all began together.

After its prompts a batch takes steps of ``fixed + a * n + b * c`` seconds for n sequences of c
cached tokens together, and a sequence ends once it has taken part in as many as it has tokens.
Engines that share a batch are taken to have equal parts of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from tandem.types import GenerationRequest

_MIN_LONGEST = 2.0
"""Times the mean length: below it all sequences run nearly to the end, and nothing tells the parts
of a step apart."""
_MAX_RESIDUAL = 0.2
"""Of the spread of the ends: above it they followed from something else, such as a full cache."""


@dataclass(frozen=True, slots=True)
class DecodePace:
    """Seconds of a decode step of one engine.

    ``per_sequence_s`` includes cached tokens, as many as in the mean over the steps of a batch, and
    the prompt's computation, spread over the steps of its sequences.
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
        self._ends, self._num_expected = [], 0
        num_sequences = sum(len(request.sample_ids) for request in requests)
        if is_alone and 0 < num_sequences <= self._num_rows:
            self._num_expected = num_sequences
            total = sum(len(r.prompt_ids) * len(r.sample_ids) for r in requests)
            self._prompt_tokens = total / num_sequences
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
    below 0; None if lengths differ too little to tell, or the ends do not follow from them.

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
    """A constant of any sign, and the factor of each part: those of the choice of parts that fits
    best without a negative factor. None if none fits, or if lengths are too few for all parts.
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
