# SPDX-License-Identifier: Apache-2.0
"""The state machine that carries weights versions from the trainer to the rollout.

The trainer publishes every version it makes. A version comes into use as soon as the rollout can
take it, and then frees the admission slots of the groups it was trained on. A version is skipped if
the trainer publishes a newer one while the rollout is bound to an old one. The trainer never
changes its weights while they are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tandem.api import Runtime, WeightStage
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.rollout_loop import RolloutLoop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlowRule:
    """The rule for when a version comes into use.

    Attributes:
        lockstep: whether the trainer waits until each version is in use, after all admitted groups
            are complete. The training loop frees the slots at the end of its step.
        finishes_on_old_weights: whether sequences finish under the version they began with.
        time_shared: whether generation uses the trainer's devices, perhaps even its weights. It
            then pauses from the start of a training step until the new version is in use.
        batch_size: the number of slots that a version frees.
    """

    lockstep: bool
    finishes_on_old_weights: bool
    time_shared: bool
    batch_size: int


class FlowState(Enum):
    """The states of ``WeightFlow``."""

    IDLE = "idle"
    FINISHING = "finishing"
    READY = "ready"
    READING = "reading"
    SWITCHING = "switching"


_NEXT_STATES = {
    FlowState.IDLE: (FlowState.FINISHING, FlowState.READY),
    FlowState.FINISHING: (FlowState.READY, FlowState.SWITCHING),
    FlowState.READY: (FlowState.READING,),
    FlowState.READING: (FlowState.FINISHING, FlowState.SWITCHING, FlowState.IDLE),
    FlowState.SWITCHING: (FlowState.IDLE,),
}


class WeightFlow:
    """The flow of weights from the trainer to the rollout, one version at a time.

    =========  ========================================  ===========================  =============
    State      Event that ends it                        Next state                   Trainer waits
    =========  ========================================  ===========================  =============
    IDLE       a newer version is published, no pins     FINISHING (if needed) READY  if READY next
    FINISHING  sequences of the old version finished     READY; staged: SWITCHING     if required
    READY      the trainer is between two steps          READING                      yes
    READING    direct: the rollout uses the version      IDLE                         yes
    READING    staged: the copy is complete              FINISHING or SWITCHING       yes
    SWITCHING  the rollout uses the version              IDLE                         if required
    =========  ========================================  ===========================  =============

    Without a stage the rollout reads the trainer's weights itself: IDLE, FINISHING, READY, READING.
    With a stage they are copied first, and the trainer goes on while the rollout finishes its
    sequences and switches to the copy: IDLE, READY, READING, FINISHING, SWITCHING. FINISHING occurs
    only with ``lockstep`` or ``finishes_on_old_weights``. READING reads the newest version.

    ``publish`` and ``begin_training`` wait in the states of the last column until the published
    version is in use or no longer read; ``wait_in_use`` waits for IDLE. ``abandon`` ends all waits
    except that for READING. A pin keeps the flow in IDLE.

    If the rollout loses its weights with its processes, they are read again at once, in the same
    states without FINISHING. The version is then the trainer's, perhaps a newer one, in spite of
    pins: nobody has the old one any more.
    """

    def __init__(
        self,
        rule: FlowRule,
        *,
        runtime: Runtime,
        stage: WeightStage | None,
        rollout: RolloutLoop,
        buffer: GroupBuffer,
        gate: AdmissionGate,
        version: int,
    ) -> None:
        self._rule = rule
        self._runtime = runtime
        self._stage = stage
        self._rollout = rollout
        self._buffer = buffer
        self._gate = gate
        self._state = FlowState.IDLE
        self._published = self._in_use = version
        self._num_pins = 0
        self._is_training = False
        self._is_abandoned = False
        self._changed = asyncio.Condition()
        rollout.when_starved(self._starve)

    @property
    def in_use(self) -> int:
        """The version that the whole rollout uses."""
        return self._in_use

    async def start(self) -> None:
        """Bring the trainer's first version into use. ``run`` need not have started."""
        if self._stage is not None:
            await self._runtime.call(self._stage.stage, self._published)
        await self._rollout.use_weights(self._published)

    async def begin_training(self) -> None:
        """Return once the trainer may change its weights; nothing reads them until ``publish``."""
        if self._is_training:
            raise RuntimeError("a training step begins before the last one has published")
        await self._until(lambda: self._may_train() and not self._must_wait_for_pins())
        self._is_training = True
        if self._rule.time_shared:
            await self._rollout.pause()

    async def publish(self, version: int, *, is_required: bool) -> None:
        """Announce that the trainer has made ``version``, and return once it may go on.

        Args:
            is_required: whether to wait until the version is in use.

        Raises:
            RuntimeError: no training step is running, or the version is not newer.
        """
        if not self._is_training or version <= self._published:
            raise RuntimeError(f"version {version} is published without a training step")
        self._published, self._is_training = version, False
        waits = is_required or self._rule.lockstep or self._rule.time_shared
        await self._notify()
        await self._until(lambda: self._may_train(is_required=waits))

    async def wait_in_use(self) -> None:
        """Return once the newest version is in use, or after ``abandon``."""
        await self._until(lambda: self._in_use == self._published or self._is_abandoned)

    async def abandon(self) -> None:
        """Stop waiting for versions to come into use, because the run is about to end."""
        self._is_abandoned = True
        await self._notify()

    def pin(self) -> None:
        """Keep the version in use until ``unpin``. Raise RuntimeError if a newer one is published.

        Several pins may be held at the same time.
        """
        if self._in_use != self._published:
            raise RuntimeError(f"version {self._in_use} is pinned, {self._published} is published")
        self._num_pins += 1

    async def unpin(self) -> None:
        """Take back one ``pin``."""
        self._num_pins -= 1
        await self._notify()

    async def run(self) -> None:
        """Bring versions into use until cancelled."""
        while True:
            await self._until(self._must_bring)
            if self._stage is None:
                await self._finish_sequences()
                version = await self._hold_trainer()
            else:
                version = await self._hold_trainer()
                await self._runtime.call(self._stage.stage, version)
                await self._finish_sequences()
                await self._enter(FlowState.SWITCHING)
            if self._rollout.is_starved and version != self._in_use:
                logger.warning(
                    "version %d was lost with the last worker that generates: unfinished samples "
                    "are generated with version %d",
                    self._in_use,
                    version,
                )
            await self._rollout.use_weights(version)
            num_versions, self._in_use = version - self._in_use, version
            if not self._rule.lockstep:
                await self._gate.release_trained(num_versions * self._rule.batch_size)
            await self._enter(FlowState.IDLE)

    async def _starve(self) -> None:
        """End the waits for sequences of a rollout without weights."""
        await self._buffer.wake()
        await self._notify()

    def _must_bring(self) -> bool:
        is_newer = self._in_use < self._published
        return self._rollout.is_starved or (is_newer and self._num_pins == 0)

    async def _finish_sequences(self) -> None:
        if not self._must_finish() or self._rollout.is_starved:
            return
        await self._enter(FlowState.FINISHING)
        if self._rule.lockstep:
            await self._buffer.wait_complete(unless=lambda: self._rollout.is_starved)
        if self._rule.finishes_on_old_weights:
            await self._rollout.drain()

    async def _hold_trainer(self) -> int:
        """Wait until the trainer is between two steps, hold it there, and return its version."""
        await self._enter(FlowState.READY)
        await self._until(lambda: not self._is_training)
        await self._enter(FlowState.READING)
        return self._published

    def _may_train(self, *, is_required: bool = False) -> bool:
        if self._state is FlowState.READING:
            return False
        if self._in_use == self._published or self._is_abandoned:
            return True
        return not is_required and not self._is_read_next()

    def _is_read_next(self) -> bool:
        """Return whether the flow waits only for a chance to read the trainer's weights."""
        if self._state is FlowState.IDLE:
            return self._num_pins == 0 and (self._stage is not None or not self._must_finish())
        return self._state is FlowState.READY

    def _must_finish(self) -> bool:
        return self._rule.lockstep or self._rule.finishes_on_old_weights

    def _must_wait_for_pins(self) -> bool:
        """Return whether a training step would change pinned weights."""
        return self._rule.time_shared and self._num_pins > 0

    async def _enter(self, state: FlowState) -> None:
        if state not in _NEXT_STATES[self._state]:
            raise RuntimeError(f"the weights cannot go from {self._state.name} to {state.name}")
        self._state = state
        await self._notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
