# SPDX-License-Identifier: Apache-2.0
"""A worker's rollout engine, which gets its weights through the weight link.

The link fills a model, the received policy. An engine that shares weights computes with it in
place. Any other copies its tensors through a sink. The received policy then needs no memory until
the next version, unless it also scores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from tandem.api import EngineFailure, RolloutEngine
from tandem.models.adapted import trained_parameters
from tandem.models.hf import TransformersModel
from tandem.models.language_model import NativeModel
from tandem.rollout.feed import WeightFeed
from tandem.weight_sync.gate import WeightGate


class LinkedRollout:
    """An engine and the policy that the link fills for it.

    Attributes:
        engine: the engine. Only this class changes its weights.
        policy: the received policy, which may lack memory between two versions.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: NativeModel | TransformersModel,
        *,
        keeps_policy: bool,
        shared: Collection[str] = (),
    ) -> None:
        """Wrap the engine and the policy.

        Args:
            keeps_policy: whether ``policy`` is needed between two versions: it computes log-probs,
                or another engine may be started with its weights.
            shared: the names of parameters whose memory is the trainer's.
        """
        self.engine = engine
        self.policy = policy
        sink = engine.sink()
        self._feed = None if sink is None else WeightFeed(policy, sink)
        # The base of adapters stays: nothing would bring it back.
        trained = trained_parameters(policy.module)
        self._memory = ParameterMemory(x for name, x in trained.items() if name not in shared)
        self._keeps_policy = sink is None or keeps_policy

    def prepare(self) -> None:
        """Allocate memory for a version that is about to arrive."""
        self._memory.allocate()
        self.engine.wake()

    def use(self, gate: WeightGate, version: int) -> None:
        """Put the received policy into use as ``version``.

        Raises:
            EngineFailure: the engine did not take it, and no version is usable any more.
        """
        if self._feed is not None:
            try:
                self._feed.deliver(version)
            except EngineFailure:
                gate.forbid(f"the rollout engine did not take version {version}")
                raise
        self.engine.set_weights_version(version)

    def release(self) -> None:
        """Free the memory of a received policy that is not computed with."""
        if not self._keeps_policy:
            self._memory.free()

    def sleep(self, gate: WeightGate, *, timeout_s: float) -> None:
        """Free all memory on the device until ``prepare``, unless there is something to generate.

        Args:
            gate: guards the received policy.
            timeout_s: a bound on the wait for its current users.
        """
        if gate.version is None or not self.engine.sleep():
            return
        with gate.writing(timeout_s):
            gate.forbid("the device trains, and new weights have not arrived")
            self._memory.free()


class ParameterMemory:
    """The memory of parameters. Freeing it keeps the tensor objects."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        storages = [weight.untyped_storage() for weight in parameters]
        self._storages = {storage.data_ptr(): storage for storage in storages}.values()
        self._sizes = [storage.nbytes() for storage in self._storages]

    def free(self) -> None:
        """Free the memory. The values are lost."""
        for storage in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again, uninitialized. Do nothing if it was not freed."""
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
