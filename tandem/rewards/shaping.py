# SPDX-License-Identifier: Apache-2.0
"""Overlong reward shaping (DAPO, arXiv:2503.14476): the last stretch of the length costs.

Changes the score only; whether the answer was right stays in ``extra["acc"]``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.errors import UserError
from tandem.types import RewardOutcome, RewardStatus


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """No penalty up to ``max_tokens - buffer_tokens``, ``-penalty_factor`` at ``max_tokens``.

    The two lengths are verl's ``max_resp_len`` and ``overlong_buffer_cfg.len``; with ``log``
    outcomes carry the penalty.

    Raises:
        UserError: the buffer is empty, or longer than the response may be.
    """

    max_tokens: int
    buffer_tokens: int
    penalty_factor: float
    log: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise UserError(
                f"reward_model.reward_kwargs.overlong_buffer_cfg.len={self.buffer_tokens}: "
                f"must be from 1 to max_resp_len={self.max_tokens}. Choose a shorter buffer."
            )


def overlong_penalty(num_tokens: int, buffer: OverlongBuffer) -> float:
    """What is added to the score of a response of ``num_tokens``: 0 or less."""
    excess = num_tokens - (buffer.max_tokens - buffer.buffer_tokens)
    return min(-excess / buffer.buffer_tokens * buffer.penalty_factor, 0.0)


def shape_outcome(
    outcome: RewardOutcome, buffer: OverlongBuffer, *, num_tokens: int
) -> RewardOutcome:
    """Add the penalty to the score. A failure stays what it is.

    ``extra`` gets the raw ``score`` and, with ``buffer.log``, ``overlong_reward`` and ``overlong``.
    """
    if outcome.status is not RewardStatus.VALUE:
        return outcome
    penalty = overlong_penalty(num_tokens, buffer)
    extra = {"score": outcome.score, **outcome.extra}
    if buffer.log:
        extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
    return replace(outcome, score=outcome.score + penalty, extra=extra)
