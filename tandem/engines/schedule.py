# SPDX-License-Identifier: Apache-2.0
"""Learning-rate schedules as pure functions of the step: the factor that multiplies the configured
rate.

The formulas are verl's and transformers' (linear warm-up, then constant or cosine). Step 0 is the
first training step, so that with a warm-up it runs at rate 0, as it does there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """Linear warm-up over ``warmup_steps``, then ``kind``.

    ``total_steps``, ``min_ratio`` (lower bound of the factor) and ``num_cycles`` (cosine waves, 0.5
    falls once) only matter for cosine.
    """

    kind: Literal["constant", "cosine"]
    warmup_steps: int
    total_steps: int
    min_ratio: float
    num_cycles: float

    def factor(self, step: int) -> float:
        """The factor of training step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        wave = math.cos(math.pi * self.num_cycles * 2.0 * progress)
        cosine = 0.5 * (1 - self.min_ratio) * wave + 0.5 * (1 + self.min_ratio)
        return max(self.min_ratio, cosine)


def warmup_steps(steps: int, ratio: float, *, total_steps: int) -> int:
    """verl's rule: a positive ``steps`` wins, else ``ratio`` of all steps, rounded down."""
    return steps if steps > 0 else int(ratio * total_steps)
