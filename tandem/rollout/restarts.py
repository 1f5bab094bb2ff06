# SPDX-License-Identifier: Apache-2.0
"""A rollout engine over child processes that is built again after its processes have ended.

The new engine receives the version in use before it generates. Unfinished samples are generated
again from their first token. An engine that draws by key gives them the same tokens, unless their
weights had changed within the sequence: they then have the current version from the beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from tandem.api import Capacity, EngineDied, EngineFacts, RolloutEngine, WeightSink
from tandem.models.language_model import LanguageModel
from tandem.rollout.feed import WeightFeed
from tandem.types import Completion, GenerationRequest, SliceSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")
KEY = "actor_rollout_ref.rollout.max_engine_restarts"


class RestartingEngine:
    """An ``api.RolloutEngine`` that starts another engine in place of one that raised EngineDied.

    Args:
        engine: the first engine, which has weights of its own.
        start: builds another one.
        model: the model that holds the weights of the version in use whenever the engine generates.
        max_restarts: the number of engines that may be started after the first.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        start: Callable[[], RolloutEngine],
        *,
        model: LanguageModel,
        max_restarts: int,
    ) -> None:
        self._start, self._model, self._max_restarts = start, model, max_restarts
        self._engine = engine
        self._sink = _sink_of(self._engine)
        self.facts: EngineFacts = self._engine.facts
        self.capacity: Capacity = self._engine.capacity
        self._manifest = self._sink.manifest()
        self._unfinished: dict[int, GenerationRequest] = {}
        self._version: int | None = None
        self._arriving = -1
        self._is_arrival_lost = False
        self._num_restarts = 0
        self._earlier: dict[str, float] = {}

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        for request in requests:
            for sample_id in request.sample_ids:
                self._unfinished[sample_id] = replace(request, sample_ids=(sample_id,))
        try:
            self._engine.add(requests)
        except EngineDied as death:
            self._restart(death)  # which adds all that is unfinished

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Free what the engine keeps of samples that have ended."""
        self._surviving(lambda engine: engine.forget(sample_ids))

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence finishes; see ``api.Rollout``."""
        finished = self._surviving(lambda engine: engine.advance(max_steps))
        for completion in finished:
            del self._unfinished[completion.sample_id]
        return finished

    def settle(self) -> None:
        """Wait until nothing is being computed."""
        self._surviving(lambda engine: engine.settle())

    def set_weights_version(self, version: int) -> bool:
        """Use the weights that have come as ``version``."""
        self._version = version
        return self._surviving(lambda engine: engine.set_weights_version(version))

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of all engines so far, and how many were started again."""
        counters = dict(self._engine.metrics())
        for name, count in self._earlier.items():
            counters[name] = counters.get(name, 0.0) + count
        return {**counters, "num_restarts": self._num_restarts}

    def sink(self) -> RestartingEngine:
        """Return this object, which hands weights to the engine of the moment."""
        return self

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Start to receive ``version``."""
        self._arriving, self._is_arrival_lost = version, False
        self._receiving(lambda sink: sink.begin(version))

    def take(self, name: str, tensor: Tensor) -> None:
        """Receive one tensor."""
        self._receiving(lambda sink: sink.take(name, tensor))

    def end(self) -> None:
        """End a version. A new engine gets all of it again from the model."""
        self._receiving(lambda sink: sink.end())
        self._version = self._arriving
        if not self._is_arrival_lost:
            return
        try:
            self._deliver()
        except EngineDied as death:
            self._restart(death)

    def sleep(self) -> bool:
        """Free the engine's memory, unless requests are pending."""
        is_asleep = self._surviving(lambda engine: engine.sleep())
        if is_asleep:
            self._version = None  # new weights follow, and the model may lose its memory
        return is_asleep

    def wake(self) -> None:
        """Allocate the memory again."""
        self._surviving(lambda engine: engine.wake())

    def close(self) -> None:
        """End the engine."""
        self._engine.close()

    def _surviving(self, call: Callable[[RolloutEngine], T]) -> T:
        """Call the engine. After its death, call the new one, which has version and samples."""
        while True:
            try:
                return call(self._engine)
            except EngineDied as death:
                self._restart(death)

    def _receiving(self, call: Callable[[WeightSink], object]) -> None:
        """Call the sink. After its death, skip the rest of the version: ``end`` repeats it."""
        if self._is_arrival_lost:
            return
        try:
            call(self._sink)
        except EngineDied as death:
            self._is_arrival_lost, self._version = True, None
            self._restart(death)

    def _restart(self, death: EngineDied) -> None:
        """Start another engine with the version in use and the unfinished samples.

        Raises:
            EngineFailure: the engine does not start, or no restart is left.
        """
        while True:
            self._replace(death)
            try:
                if self._version is not None:
                    self._deliver()
                if self._unfinished:
                    self._engine.add(list(self._unfinished.values()))
            except EngineDied as again:
                death = again
            else:
                return

    def _replace(self, death: EngineDied) -> None:
        """Start another engine, without weights."""
        self._earlier = {k: v for k, v in self.metrics().items() if k != "num_restarts"}
        self._engine.close()
        if self._num_restarts == self._max_restarts:
            raise death
        self._num_restarts += 1
        logger.warning(
            "%s. It is started again (%d of %s=%d), and its %d unfinished samples are generated "
            "again",
            death,
            self._num_restarts,
            KEY,
            self._max_restarts,
            len(self._unfinished),
        )
        self._engine = self._start()
        self._sink = _sink_of(self._engine)

    def _deliver(self) -> None:
        """Bring the engine to the version in use."""
        assert self._version is not None, "a version is in use"
        WeightFeed(self._model, self._sink).deliver(self._version)
        self._engine.set_weights_version(self._version)


def _sink_of(engine: RolloutEngine) -> WeightSink:
    sink = engine.sink()
    assert sink is not None, "an engine over child processes has weights of its own"
    return sink
