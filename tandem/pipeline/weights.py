# SPDX-License-Identifier: Apache-2.0
"""The way of the weights from the trainer to the rollout, and what waits for it.

The trainer offers each version it has made; a version is brought into use as soon as the rollout
can take it, and the admission slots of the groups trained on are free from then on. Versions may be
left out while the rollout is bound to an older one, by a validation or by sequences that are to end
under the weights they began with; training goes on meanwhile, except that a version that must not
be left out is waited for. While its weights are taken the trainer does not change them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tandem.api import Runtime, WeightStage
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.rollout_loop import RolloutRouter


@dataclass(frozen=True, slots=True)
class FlowRule:
    """When weights are taken.

    Attributes:
        in_rounds: every version is waited for, and comes into use once all groups that were
            admitted are complete. Slots are then given back by whoever ends the round.
        drains: sequences end under the weights they began with.
        takes_turns: the devices that generate are those that train, perhaps with the very weights
            that an update changes. Generation pauses in between two versions, and every one comes
            into use.
        batch_size: slots that a version frees.
    """

    in_rounds: bool
    drains: bool
    takes_turns: bool
    batch_size: int


@dataclass(frozen=True, slots=True)
class FlowEnds:
    """What the weights pass by. ``stage`` is None where the rollout takes them from the trainer."""

    runtime: Runtime
    stage: WeightStage | None
    router: RolloutRouter
    buffer: GroupBuffer
    gate: AdmissionGate


class WeightFlow:
    """Consumes: versions. Waits for: the trainer between two steps, the rollout where it has to
    end something. Unblocked by: ``offer``, ``unpin``. Produces: weights in use, free slots.
    """

    def __init__(self, ends: FlowEnds, rule: FlowRule, *, version: int) -> None:
        self._ends = ends
        self._rule = rule
        self._trained = self._in_use = self._staged = version
        self._is_required = self._is_training = False
        self._is_taking = self._is_switching = self._is_settled = False
        self._num_pins = 0
        self._is_let_go = False
        self._changed = asyncio.Condition()

    @property
    def in_use(self) -> int:
        """The version that all of the rollout uses."""
        return self._in_use

    async def start(self) -> None:
        """Bring the version that the trainer begins with into use; ``run`` is not needed yet."""
        if self._ends.stage is not None:
            await self._ends.runtime.call(self._ends.stage.stage, self._trained)
        await self._ends.router.use_weights(self._trained)

    async def begin_training(self) -> None:
        """Return once the trainer's weights may change; nobody takes them from then on."""
        await self._until(lambda: self._may_train() and not self._must_wait_for_pins())
        self._is_training = True
        if self._rule.takes_turns:
            await self._ends.router.pause()

    async def offer(self, version: int, *, is_required: bool) -> None:
        """The trainer has made ``version``. Returns once it has been taken, or need not be now.

        Args:
            is_required: it must come into use, and is waited for.
        """
        self._trained, self._is_training = version, False
        self._is_required = is_required or self._rule.in_rounds or self._rule.takes_turns
        await self._notify()
        await self._until(self._may_train)

    async def arrive(self) -> None:
        """Return once the newest version is in use, or need not be any more."""
        await self._until(lambda: self._in_use == self._trained or self._is_let_go)

    async def let_go(self) -> None:
        """The trainer is about to end: no version need come into use any more."""
        self._is_let_go = True
        await self._notify()

    def pin(self) -> None:
        """The version in use stays in use until ``unpin``."""
        self._num_pins += 1

    async def unpin(self) -> None:
        """Take back one ``pin``."""
        self._num_pins -= 1
        await self._notify()

    async def run(self) -> None:
        """Bring versions into use; ends only by cancellation."""
        while True:
            await self._until(lambda: self._in_use < self._trained and self._num_pins == 0)
            if self._ends.stage is None:
                await self._settle()
                version = await self._hold_trainer()
            else:
                version = await self._hold_trainer()
                await self._ends.runtime.call(self._ends.stage.stage, version)
                self._staged, self._is_switching, self._is_taking = version, True, False
                await self._notify()
                await self._settle()
            await self._ends.router.use_weights(version)
            await self._came_into_use(version)

    async def _came_into_use(self, version: int) -> None:
        num_versions, self._in_use = version - self._in_use, version
        self._is_taking = self._is_switching = self._is_settled = False
        if not self._rule.in_rounds:
            await self._ends.gate.release_trained(num_versions * self._rule.batch_size)
        await self._notify()

    async def _settle(self) -> None:
        """Wait for what is to end under the weights in use."""
        if self._rule.in_rounds:
            await self._ends.buffer.settled()
        if self._rule.drains:
            await self._ends.router.drain()
        self._is_settled = True
        await self._notify()

    async def _hold_trainer(self) -> int:
        """Wait until the trainer is between two steps, and keep it there; the version it has."""
        await self._until(lambda: not self._is_training)
        self._is_taking = True
        return self._trained

    def _may_train(self) -> bool:
        """Whether the trainer may go on: the version it has made was taken, or cannot be now."""
        if self._is_taking:
            return False
        if self._in_use == self._trained or self._is_let_go:
            return True
        if self._is_required:
            return False
        return self._staged == self._trained or not self._can_take()

    def _must_wait_for_pins(self) -> bool:
        """Whether what is bound to the version in use would see it change."""
        return self._rule.takes_turns and self._num_pins > 0

    def _can_take(self) -> bool:
        """Whether the version made last would be taken at once."""
        if self._num_pins > 0 or self._is_switching:
            return False
        waits = self._rule.in_rounds or self._rule.drains
        return self._ends.stage is not None or self._is_settled or not waits

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
