# SPDX-License-Identifier: Apache-2.0
"""The methods of a rollout engine that most engines have nothing to do in."""

from __future__ import annotations

from collections.abc import Sequence


class Resting:
    """Methods of ``api.RolloutEngine`` that do nothing. An engine overrides those that must act."""

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept between turns, or it gives way by itself."""

    def settle(self) -> None:
        """Return at once: nothing is being computed that weights may not change under."""

    def wake(self) -> None:
        """Do nothing: the memory is there, or the next ``advance`` allocates it."""

    def close(self) -> None:
        """Do nothing."""
