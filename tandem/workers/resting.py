# SPDX-License-Identifier: Apache-2.0
"""A rollout on a device that also trains: while it does, generation takes no memory.

Weights come anew before the next generation anyway, so that nothing is kept of them either.
"""

from __future__ import annotations

from torch import nn

from tandem.api import RolloutEngine
from tandem.weight_sync.gate import WeightGate


class RestingRollout:
    """Lends the memory of cache and weights to whatever else the device does."""

    def __init__(
        self, engine: RolloutEngine, module: nn.Module, *, gate: WeightGate, timeout_s: float
    ) -> None:
        """``module`` is what ``engine`` computes with, by the weights that ``gate`` guards.
        ``timeout_s`` bounds the wait for those who use them."""
        self._engine = engine
        self._gate = gate
        self._timeout_s = timeout_s
        storages = [weight.untyped_storage() for weight in module.parameters()]
        self._storages = {storage.data_ptr(): storage for storage in storages}.values()
        self._sizes = [storage.nbytes() for storage in self._storages]

    def rest(self) -> None:
        """Give the memory away, unless there is something to generate."""
        if self._gate.version is None or not self._engine.release_cache():
            return
        with self._gate.writing(self._timeout_s):
            self._gate.forbid("the device trains, and new ones have not come")
            for storage in self._storages:
                storage.resize_(0)

    def wake(self) -> None:
        """Take it back, for new weights; does nothing if it was not given away."""
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
