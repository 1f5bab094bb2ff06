# SPDX-License-Identifier: Apache-2.0
"""An engine that is built again after its death: the same tokens, and each sample once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from tandem.api import EngineDied, EngineFailure, WeightSink
from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec, build_hf
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.rollout.hf import HfRolloutEngine
from tandem.rollout.restarts import RestartingEngine
from tandem.types import Completion, GenerationRequest, SamplingParams, SliceSpec
from tests.fakes.tiny_qwen2 import write_random_qwen2

RULE = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=6)
REQUESTS = [
    GenerationRequest((0, 1), (5, 6, 7), RULE),
    GenerationRequest((2,), (8, 9), SamplingParams(0.7, 0.8, 20, max_new_tokens=4)),
    GenerationRequest((3, 4), (9, 9, 9), RULE),
]


class Mortal:
    """An engine with weights of its own that dies in its n-th call of a method."""

    def __init__(self, inner: HfRolloutEngine, death: tuple[str, int] | None) -> None:
        self._inner, self._death = inner, death
        self._calls: dict[str, int] = {}
        self.is_dead = self.is_closed = False
        self.facts, self.capacity = inner.facts, inner.capacity

    def _live(self, name: str) -> HfRolloutEngine:
        self._calls[name] = self._calls.get(name, 0) + 1
        if self.is_dead or self._death == (name, self._calls[name]):
            self.is_dead = True
            raise EngineDied("the engine: its process ended")
        return self._inner

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._live("add").add(requests)

    def forget(self, sample_ids: Sequence[int]) -> None:
        self._live("forget").forget(sample_ids)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        return self._live("advance").advance(max_steps)

    def settle(self) -> None:
        self._live("settle").settle()

    def set_weights_version(self, version: int) -> bool:
        return self._live("set_weights_version").set_weights_version(version)

    def metrics(self) -> Mapping[str, float]:
        return self._inner.metrics()

    def sink(self) -> WeightSink:
        return self

    def manifest(self) -> Sequence[SliceSpec]:
        return self._sink().manifest()

    def begin(self, version: int) -> None:
        self._live("begin")
        self._sink().begin(version)

    def take(self, name: str, tensor: Tensor) -> None:
        self._live("take")
        self._sink().take(name, tensor)

    def end(self) -> None:
        self._live("end")
        self._sink().end()

    def sleep(self) -> bool:
        return self._live("sleep").sleep()

    def wake(self) -> None:
        self._live("wake").wake()

    def close(self) -> None:
        self.is_closed = True

    def _sink(self) -> WeightSink:
        sink = self._inner.sink()
        assert sink is not None, "it has weights of its own"
        return sink


class Bench:
    """A restarting engine over engines that die as planned, and the trainer's model."""

    def __init__(self, spec: EngineSpec, deaths: Sequence[tuple[str, int]], max_restarts: int):
        self._spec, self._deaths = spec, iter(deaths)
        self.started: list[Mortal] = []
        self.model: LanguageModel = spec.model
        self.engine = RestartingEngine(
            self.start(), self.start, model=spec.model, max_restarts=max_restarts
        )
        self.rollout = FedRollout(self.engine, WeightFeed(spec.model, self.engine))

    def start(self) -> Mortal:
        inner = build_hf(self._spec)
        assert isinstance(inner, HfRolloutEngine)
        self.started.append(Mortal(inner, next(self._deaths, None)))
        return self.started[-1]

    def generate(self) -> list[tuple[int, list[int], int]]:
        """Add all requests; (sample, tokens, version) of each completion."""
        self.rollout.add(REQUESTS)
        finished: list[Completion] = []
        counters = dict(self.rollout.metrics())
        while completions := self.rollout.advance():
            finished += completions
            before, counters = counters, dict(self.rollout.metrics())
            assert all(counters[name] >= before[name] for name in before), "a counter fell"
        return sorted((c.sample_id, list(c.token_ids), c.weights_version) for c in finished)

    def run(self) -> list[list[tuple[int, list[int], int]]]:
        """Generate under three versions, with a rest before the last."""
        found: list[list[tuple[int, list[int], int]]] = []
        for version in range(3):
            with torch.no_grad():
                for weight in self.model.module.parameters():
                    weight.mul_(1.0 + 0.1 * version)
            if version == 2:
                assert self.engine.sleep()
                self.engine.wake()
            self.rollout.set_weights_version(version)
            found.append(self.generate())
        return found


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """The model of all tests, which change it."""
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=False)
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    model.module.requires_grad_(False)
    return EngineSpec(model, folder, RolloutConfig(seed=3, max_num_seqs=2), (0, 1), CPU)


@pytest.fixture
def spec(opened: EngineSpec) -> Iterator[EngineSpec]:
    """The model with its first weights."""
    weights = [weight.clone() for weight in opened.model.module.parameters()]
    yield opened
    for weight, values in zip(opened.model.module.parameters(), weights, strict=True):
        weight.copy_(values)


@pytest.fixture(scope="module")
def expected(opened: EngineSpec) -> list[list[tuple[int, list[int], int]]]:
    """What an engine generates that lives."""
    weights = [weight.clone() for weight in opened.model.module.parameters()]
    found = Bench(opened, [], max_restarts=0).run()
    for weight, values in zip(opened.model.module.parameters(), weights, strict=True):
        weight.copy_(values)
    return found


CALLS = ("begin", "take", "end", "set_weights_version", "add", "advance")
DEATHS = [[(name, 2)] for name in CALLS] + [
    [("begin", 1)],
    [("take", 30)],
    [("advance", 3)],
    [("settle", 2)],
    [("sleep", 1)],
    [("wake", 1)],
    [("advance", 2), ("take", 3), ("set_weights_version", 1), ("add", 1)],
]


@pytest.mark.parametrize("deaths", DEATHS, ids=str)
def test_a_death_changes_no_token(
    spec: EngineSpec,
    expected: list[list[tuple[int, list[int], int]]],
    deaths: list[tuple[str, int]],
) -> None:
    bench = Bench(spec, deaths, max_restarts=len(deaths))
    assert bench.run() == expected
    assert bench.engine.metrics()["num_restarts"] == len(deaths)
    assert [engine.is_closed for engine in bench.started] == [True] * len(deaths) + [False]
    bench.engine.close()
    assert bench.started[-1].is_closed


def test_the_number_of_restarts_is_bounded(
    spec: EngineSpec, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(spec, [("advance", 1)] * 3, max_restarts=2)
    with pytest.raises(EngineDied, match="the engine: its process ended"):
        bench.run()
    assert [engine.is_closed for engine in bench.started] == [True] * 3
    assert caplog.messages[0] == (
        "the engine: its process ended. It is started again (1 of actor_rollout_ref.rollout."
        "max_engine_restarts=2), and its 5 unfinished samples are generated again"
    )


def test_other_failures_are_not_repeated(spec: EngineSpec) -> None:
    bench = Bench(spec, [], max_restarts=3)
    bench.engine.begin(0)
    with pytest.raises(EngineFailure):
        bench.engine.end()
    assert bench.engine.metrics()["num_restarts"] == 0
