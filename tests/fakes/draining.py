# SPDX-License-Identifier: Apache-2.0
"""The completions of a rollout engine that has no further requests."""

from __future__ import annotations

from tandem.api import RolloutEngine
from tandem.types import Completion


def drain(engine: RolloutEngine) -> list[Completion]:
    """Return all completions, in the order in which they end."""
    finished: list[Completion] = []
    while completions := engine.advance():
        finished += completions
    return finished


def drain_by_sample(engine: RolloutEngine) -> dict[int, Completion]:
    """Return all completions by the id of their sample."""
    return {completion.sample_id: completion for completion in drain(engine)}
