# SPDX-License-Identifier: Apache-2.0
"""Admission slots, which bound how far generation runs ahead of training.

A slot is charged when a prompt is admitted to generation. It is released when the weights trained
on the prompt are in use by the rollout, or when its group is dropped. With ``(ahead + 1) *
prompts_per_step`` slots, no sample is more than ``ahead`` versions old when it is trained on.
"""

from __future__ import annotations

import asyncio


class AdmissionGate:
    """A counter of slots. ``admit`` waits for a free slot and is unblocked by ``release_*``.

    Args:
        num_slots: the maximum number of prompts between admission and release.
        num_wanted: the number of prompts to be trained on in the whole run.

    Example:
        With num_slots=4, num_wanted=8: admit() -> 4; release_dropped(1): admit() -> 1;
        release_trained(4): admit() -> 4; release_trained(4): admit() -> 0, the end.
    """

    def __init__(self, num_slots: int, num_wanted: int) -> None:
        self._num_slots = num_slots
        self._num_wanted = num_wanted
        self._num_open = 0
        self._num_trained = 0
        self._changed = asyncio.Condition()

    def _num_admissible(self) -> int:
        remaining = self._num_wanted - self._num_trained - self._num_open
        return min(self._num_slots - self._num_open, remaining)

    async def admit(self, at_most: int | None = None) -> int:
        """Charge all free slots, but at most ``at_most``, and return their number.

        The number is at least 1 while prompts are wanted, and 0 once all have been trained on.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._num_admissible() > 0 or self._num_trained >= self._num_wanted
            )
            count = max(self._num_admissible(), 0)
            count = count if at_most is None else min(count, at_most)
            self._num_open += count
            return count

    async def release_trained(self, count: int) -> None:
        """Release the slots of ``count`` prompts: weights trained on them are in use."""
        self._num_trained += count
        await self._release(count)

    async def release_dropped(self, count: int) -> None:
        """Release the slots of ``count`` prompts that will not be trained on."""
        await self._release(count)

    async def _release(self, count: int) -> None:
        if count > self._num_open:
            raise RuntimeError(f"released {count} slots, only {self._num_open} were charged")
        async with self._changed:
            self._num_open -= count
            self._changed.notify_all()
