# SPDX-License-Identifier: Apache-2.0
"""The rounds of a paged engine that divides experts with those of other processes.

A round is prefill passes, and then replays of a captured step. All processes do as many of both as
the one with the most, with equal numbers of rows, because each computes its experts for the rows of
all. They capture a step at the same time, because capturing may run it. A process without a pass or
a row of its own computes its experts only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.models.decoder import Decoder
from tandem.models.expert_parallel import compute_for_peers, equal_rows
from tandem.platforms.capture import Capturer, Replay
from tandem.rollout.lock_step import LockStep


@dataclass(frozen=True, slots=True)
class Round:
    """The work of one process in a round, or of all.

    Attributes:
        num_rows: the number of rows of a step; of all processes, one that is captured.
        filtered: whether a row draws from some tokens only.
    """

    num_passes: int = 0
    num_steps: int = 0
    num_rows: int = 0
    filtered: bool = False


class Rounds:
    """The part of one process in the rounds.

    Args:
        sizes: the numbers of rows for which steps are captured, ascending.
    """

    def __init__(
        self,
        decoder: Decoder,
        lock_step: LockStep,
        *,
        make_capturer: Callable[[], Capturer],
        sizes: list[int],
    ) -> None:
        self._decoder = decoder
        self._make_capturer = make_capturer
        self._sizes = sizes
        self._capture: Capturer | None = None
        self._replays: dict[int, Replay] = {}
        self.lock_step = lock_step

    def begin(self, own: Round, *, is_captured: Callable[[Round], bool]) -> tuple[Round, bool]:
        """Begin a round in which this process does ``own``.

        Returns:
            the round of all, and whether all of them capture its step now.
        """
        self.lock_step.begin_pass()
        return self._agree(own, is_captured)

    def compute_passes(self, number: int) -> None:
        """Take part in prefill passes of other processes."""
        for _ in range(number):
            compute_for_peers(self._decoder)

    def attend(self) -> None:
        """Take part in a round without work of this process."""
        common, captures = self._agree(Round(), lambda common: common.num_rows in self._replays)
        size = common.num_rows
        if captures:
            self._capture = self._capture or self._make_capturer()
            self._replays[size] = self._capture(lambda: self._step(size))
        self.compute_passes(common.num_passes)
        for _ in range(common.num_steps):
            self._replays[size]()

    def free(self) -> None:
        """Free what was captured."""
        self._replays.clear()
        self._capture = None

    def _agree(self, own: Round, is_captured: Callable[[Round], bool]) -> tuple[Round, bool]:
        numbers = (own.num_passes, own.num_steps, own.num_rows, int(own.filtered))
        passes, steps, rows, filtered = self.lock_step.largest(numbers)
        if rows == 0:
            return Round(), False
        size = next(size for size in self._sizes if size >= rows)
        common = Round(passes, steps, size, bool(filtered))
        (captures,) = self.lock_step.largest((int(not is_captured(common)),))
        return common, bool(captures)

    def _step(self, size: int) -> None:
        with equal_rows(self._decoder):
            compute_for_peers(self._decoder, num_rows=size)
