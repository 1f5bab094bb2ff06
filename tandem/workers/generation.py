# SPDX-License-Identifier: Apache-2.0
"""A rollout engine of a worker, whose weights come through the weight link.

The link fills a model, the received policy. An engine that shares weights computes with it in
place. Any other takes its tensors through a sink, and then the received policy needs no memory
until the next version, unless it scores as well.
"""

from __future__ import annotations

from torch import nn

from tandem.api import EngineFailure, RolloutEngine
from tandem.models.language_model import NativeModel
from tandem.rollout.feed import WeightFeed
from tandem.weight_sync.gate import WeightGate


class LinkedRollout:
    """An engine and the policy that the link fills for it.

    Attributes:
        engine: the engine. Callers other than this class do not change its weights.
        policy: the received policy, which may lack memory between two versions.
    """

    def __init__(self, engine: RolloutEngine, policy: NativeModel, *, scores: bool) -> None:
        """Take over both.

        Args:
            scores: whether ``policy`` computes log-probs between two versions.
        """
        self.engine = engine
        self.policy = policy
        sink = engine.sink()
        self._feed = None if sink is None else WeightFeed(policy, sink)
        self._memory = ParameterMemory(policy.module)
        self._keeps_policy = sink is None or scores

    def prepare(self) -> None:
        """Take memory for a version that arrives."""
        self._memory.allocate()
        self.engine.wake()

    def use(self, gate: WeightGate, version: int) -> None:
        """Bring the received policy into use as ``version``.

        Raises:
            EngineFailure: the engine did not take it. No version can be used then.
        """
        if self._feed is not None:
            try:
                self._feed.deliver(version)
            except EngineFailure:
                gate.forbid(f"the rollout engine did not take version {version}")
                raise
        self.engine.set_weights_version(version)

    def release(self) -> None:
        """Free the memory of a received policy that nobody computes with."""
        if not self._keeps_policy:
            self._memory.free()

    def sleep(self, gate: WeightGate, *, timeout_s: float) -> None:
        """Free all memory on the device, unless there is something to generate. ``prepare`` ends
        this.

        Args:
            gate: guards the received policy.
            timeout_s: bounds the wait for those who use it.
        """
        if gate.version is None or not self.engine.sleep():
            return
        with gate.writing(timeout_s):
            gate.forbid("the device trains, and new ones have not come")
            self._memory.free()


class ParameterMemory:
    """The memory of a module's parameters, which remain the same tensors without it."""

    def __init__(self, module: nn.Module) -> None:
        storages = [weight.untyped_storage() for weight in module.parameters()]
        self._storages = {storage.data_ptr(): storage for storage in storages}.values()
        self._sizes = [storage.nbytes() for storage in self._storages]

    def free(self) -> None:
        """Free the memory. The values are lost."""
        for storage in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again, with any content; nothing happens if it was not freed."""
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
