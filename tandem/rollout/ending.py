# SPDX-License-Identifier: Apache-2.0
"""Why a sequence ended, from its last token."""

from __future__ import annotations

import math

from tandem.types import FinishReason


def finish_reason(log_prob: float, *, stopped: bool) -> FinishReason:
    """FAILED if the last log-prob is not a number, because then the logits were not."""
    if math.isnan(log_prob):
        return FinishReason.FAILED
    return FinishReason.STOP if stopped else FinishReason.LENGTH
