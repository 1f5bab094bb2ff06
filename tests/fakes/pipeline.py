# SPDX-License-Identifier: Apache-2.0
"""A runtime and groups for the phases of a step, without a cluster or a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from tandem.pipeline.context import RunContext
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
)

FAILED = RewardOutcome(RewardStatus.ERROR, math.nan, {}, "out of order")


class ImmediateRuntime:
    """A runtime that makes calls at once."""

    async def call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        """Implement ``api.Runtime``."""
        return function(*values, **named)


def partial_context(**given: Any) -> RunContext:
    """Return a context with the given collaborators, and None for each other without a default."""
    needed = [field.name for field in fields(RunContext) if field.default_factory is MISSING]
    return RunContext(**{**dict.fromkeys(needed), **given})  # type: ignore[arg-type]


def scored_group(uid: int, *scores: float | None) -> Group:
    """Return responses of 3 equal tokens; response k has token ``20 * uid + k``.

    A score of None is a reward that failed.
    """
    outcomes = [FAILED if s is None else RewardOutcome(RewardStatus.VALUE, s) for s in scores]
    drawn = [
        Completion(k, (20 * uid + k,) * 3, (-0.5,) * 3, FinishReason.STOP, 0)
        for k in range(len(scores))
    ]
    samples = tuple(
        Sample(Trajectory.of_single_turn((4,), completion), "", outcome)
        for completion, outcome in zip(drawn, outcomes, strict=True)
    )
    return Group(Prompt(uid, uid, (4,), "", "source", ""), samples)
