# SPDX-License-Identifier: Apache-2.0
"""The base of rollout engines that need nothing between their calls."""

from __future__ import annotations

from collections.abc import Sequence


class Resting:
    """The methods of ``api.RolloutEngine`` of an engine that keeps nothing and holds nothing."""

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Do nothing: nothing is kept between turns, or it gives way by itself."""

    def settle(self) -> None:
        """Return at once: between two calls nothing is being computed."""

    def wake(self) -> None:
        """Do nothing: the memory is there, or the next ``advance`` allocates it."""

    def close(self) -> None:
        """Do nothing."""
