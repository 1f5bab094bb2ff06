# SPDX-License-Identifier: Apache-2.0
"""The processes of a run whose devices belong to an engine of SGLang that another process holds.

SGLang's engine over several devices has one scheduler process for each, and all of them are
children of the first process of the run that these devices belong to. The others generate nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tandem.api import Capacity, EngineFacts
from tandem.rollout.resting import Resting
from tandem.types import Completion, GenerationRequest, SliceSpec


class Follower(Resting):
    """An ``api.RolloutEngine`` that generates nothing. It is its own sink, and drops weights.

    Args:
        facts: those of the engine.
        capacity: that of the engine.
        manifest: the tensors of a version.
    """

    def __init__(
        self, facts: EngineFacts, capacity: Capacity, *, manifest: Sequence[SliceSpec]
    ) -> None:
        self.facts, self.capacity, self._manifest = facts, capacity, manifest

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Do nothing."""

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Return no completions."""
        return []

    def set_weights_version(self, version: int) -> bool:
        """Accept any version."""
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return no counters."""
        return {}

    def sink(self) -> Follower:
        """Return this object."""
        return self

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Do nothing."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Drop a tensor."""

    def end(self) -> None:
        """Do nothing."""

    def sleep(self) -> bool:
        """Return that nothing is to be generated."""
        return True
