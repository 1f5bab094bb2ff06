# SPDX-License-Identifier: Apache-2.0
"""Groups complete whatever the order of their samples, and no sequence gets lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tandem.metrics.decode_pace import PaceRecorder
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.rollout_loop import EngineSpans, RolloutLoop
from tandem.runtime.inprocess import InProcessRuntime
from tandem.types import (
    Completion,
    EngineWork,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)


class ReversingEngine:
    """Finishes one sequence an advance, the newest first."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.batches: list[list[int]] = []
        self.forgotten: list[int] = []
        self.version = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        ids = [i for request in requests for i in request.sample_ids]
        self.batches.append(ids)
        self.waiting.extend(ids)

    def forget(self, sample_ids: Sequence[int]) -> None:
        self.forgotten += sample_ids

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        if not self.waiting:
            return []
        sample_id = self.waiting.pop()
        return [Completion(sample_id, (sample_id,), (-0.5,), FinishReason.STOP, self.version)]

    def settle(self) -> None:
        raise AssertionError("the writer of weights settles")

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def set_weights_version(self, version: int) -> bool:
        self.version = version
        return True


class ForgetfulEngine(ReversingEngine):
    """Accepts work and then knows of none."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.batches.append([])


class SlowReceiver(ReversingEngine):
    """Has weights only after three more advances, as long as there is work."""

    num_asked = 0

    def set_weights_version(self, version: int) -> bool:
        self.num_asked += 1
        if self.waiting and self.num_asked < 4:
            return False
        return super().set_weights_version(version)


def request(*sample_ids: int) -> GenerationRequest:
    return GenerationRequest(sample_ids=sample_ids, prompt_ids=(1, 2), sampling=SAMPLING)


@asynccontextmanager
async def looping(
    engine: ReversingEngine,
    *,
    is_bounded: bool = False,
    num_rows: int | None = None,
    in_waves: bool = False,
    trace: TraceRecorder | None = None,
    lacks_weights: Callable[[], bool] = lambda: False,
) -> AsyncIterator[RolloutLoop]:
    """A rollout loop that runs within the block."""
    runtime = InProcessRuntime()
    trace = trace or TraceRecorder(lambda: 0.0, sink=None)
    spans = EngineSpans(trace, lambda: [EngineWork.NEXT])
    pace = PaceRecorder(lambda: 0.0, num_engines=1, num_rows=num_rows)
    loop = RolloutLoop(
        engine,
        runtime,
        spans=spans,
        pace=pace,
        is_bounded=is_bounded,
        num_rows=num_rows,
        in_waves=in_waves,
        lacks_weights=lacks_weights,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            driver = tasks.create_task(loop.run())
            yield loop
            driver.cancel()
    finally:
        await runtime.close()


async def generate(
    engine: ReversingEngine, requests: list[GenerationRequest], *, is_bounded: bool = False
) -> list[list[int]]:
    async with looping(engine, is_bounded=is_bounded) as loop:
        futures = loop.submit(requests)
        return [[completion.sample_id for completion in await future] for future in futures]


def test_groups_come_back_whole_and_in_order() -> None:
    engine = ReversingEngine()
    results = asyncio.run(generate(engine, [request(0, 1, 2), request(3, 4)]))
    assert results == [[0, 1, 2], [3, 4]]


def test_requests_submitted_together_are_added_together() -> None:
    engine = ReversingEngine()
    asyncio.run(generate(engine, [request(0, 1), request(2, 3)]))
    assert engine.batches == [[0, 1, 2, 3]]


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_lost_sequence_is_an_error_and_not_a_hang(is_bounded: bool) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(generate(ForgetfulEngine(), [request(0)], is_bounded=is_bounded))
    assert "lost 1 of its sequences" in str(caught.value.exceptions[0])


def test_weights_that_are_on_their_way_do_not_stop_generation() -> None:
    async def versions() -> list[int]:
        engine = SlowReceiver()
        async with looping(engine) as loop:
            futures = loop.submit([request(*range(8))])
            while not engine.batches:
                await asyncio.sleep(0)
            await loop.use_weights(5)
            return [completion.weights_version for completion in await futures[0]]

    drawn_by = asyncio.run(versions())
    assert sorted(drawn_by) == sorted([0] * drawn_by.count(0) + [5] * drawn_by.count(5))
    assert drawn_by.count(0) >= 3 and drawn_by.count(5) >= 1


def test_a_drained_engine_gets_no_request_before_its_weights() -> None:
    async def versions() -> tuple[list[int], list[int]]:
        async with looping(ReversingEngine()) as loop:
            (early,) = loop.submit([request(0, 1, 2)])
            await asyncio.sleep(0)
            await loop.drain()
            assert early.done()
            (late,) = loop.submit([request(3, 4)])
            await asyncio.sleep(0.05)
            assert not late.done()
            await loop.use_weights(1)
            return [c.weights_version for c in await early], [c.weights_version for c in await late]

    assert asyncio.run(versions()) == ([0, 0, 0], [1, 1])


def test_a_paused_engine_is_asked_for_nothing_before_its_weights() -> None:
    class Counting(ReversingEngine):
        num_advances = 0
        num_settled = 0

        def settle(self) -> None:
            self.num_settled += 1

        def advance(self, max_steps: int | None = None) -> list[Completion]:
            self.num_advances += 1
            return super().advance(max_steps)

    async def versions() -> list[int]:
        engine = Counting()
        async with looping(engine, is_bounded=True) as loop:
            (early,) = loop.submit([request(*range(6))])
            while engine.num_advances < 2:
                await asyncio.sleep(0)
            await loop.pause()
            assert engine.num_settled == 1
            num_advances = engine.num_advances
            (late,) = loop.submit([request(7, 8)])
            await asyncio.sleep(0.05)
            assert (engine.num_advances, len(engine.batches)) == (num_advances, 1)
            await loop.use_weights(1)
            return [c.weights_version for c in (*await early, *await late)]

    drawn_by = asyncio.run(versions())
    assert drawn_by.count(0) >= 2 and drawn_by[-2:] == [1, 1]
    assert 1 in drawn_by[:6]


@pytest.mark.parametrize(("num_rows", "most"), [(1, 2), (16, 20), (1024, 1280)])
def test_there_is_room_while_little_waits_for_rows(num_rows: int, most: int) -> None:
    async def rooms() -> tuple[int | None, list[int | None]]:
        async with looping(ReversingEngine(), num_rows=num_rows) as loop:
            empty = await loop.room()
            loop.submit([request(*range(most + 1))])
            asking = asyncio.create_task(loop.room())
            await asyncio.sleep(0)
            assert not asking.done()
            return empty, [await asking]

    lot = most - num_rows
    assert asyncio.run(rooms()) == (most + lot, [lot])


def test_without_rows_there_is_no_bound() -> None:
    async def room() -> int | None:
        async with looping(ReversingEngine()) as loop:
            loop.submit([request(*range(1000))])
            return await loop.room()

    assert asyncio.run(room()) is None


def test_a_span_lasts_from_the_advance_it_begins_in_to_the_one_that_collects() -> None:
    """Three engines: the second is not collected from by the first advance, the third idles."""
    now = [0.0]
    work = [EngineWork.NEXT, EngineWork.NEXT, EngineWork.NONE]
    trace = TraceRecorder(lambda: now[0], sink=None)
    spans = EngineSpans(trace, lambda: work)
    with spans.advancing(3):
        now[0] += 1
        work[1] = EngineWork.UNDER_WAY
    now[0] += 4
    work[0] = EngineWork.NONE
    with spans.advancing(3):
        now[0] += 1
        work[1] = EngineWork.NEXT
    now[0] += 3
    assert trace.take_step(1)["pipeline/busy_s/generate"] == pytest.approx((1 + 6 + 0) / 3)


def test_engines_of_an_advance_that_fails_work_no_more() -> None:
    now = [0.0]
    trace = TraceRecorder(lambda: now[0], sink=None)
    spans = EngineSpans(trace, lambda: [EngineWork.UNDER_WAY])
    with pytest.raises(RuntimeError), spans.advancing(0):
        raise RuntimeError
    now[0] += 1
    assert trace.take_step(1)["pipeline/busy_s/generate"] == 0


def test_it_is_traced_what_an_idle_engine_waits_for() -> None:
    """Prompts for 2 s, weights for 3 s after all sequences have ended, an update for 4 s."""

    class Settling(ReversingEngine):
        def settle(self) -> None:
            pass

    now = [0.0]
    trace = TraceRecorder(lambda: now[0], sink=None)

    async def idle() -> None:
        async with looping(Settling(), is_bounded=True, trace=trace) as loop:
            await asyncio.sleep(0.02)
            now[0] += 2
            loop.submit([request(0, 1, 2)])
            await loop.drain()
            await asyncio.sleep(0.02)
            now[0] += 3
            await loop.use_weights(1)
            (late,) = loop.submit([request(3, 4)])
            await loop.pause()
            await asyncio.sleep(0.02)
            now[0] += 4
            await loop.use_weights(2)
            await late

    asyncio.run(idle())
    metrics = trace.take_step(1)
    waits = {name: metrics[f"pipeline/wait_s/generate/{name}"] for name in ("admission", "sync")}
    assert waits == {"admission": 2, "sync": 3}
    assert metrics["pipeline/wait_s/generate/update"] == 4


def test_the_rollout_is_stopped_for_one_reason_at_a_time() -> None:
    async def stop() -> None:
        async with looping(ReversingEngine()) as loop:
            await loop.drain()
            with pytest.raises(RuntimeError, match="from DRAINING to PAUSED"):
                await loop.pause()
            await loop.use_weights(1)
            with pytest.raises(RuntimeError, match="version 1 is wanted after 1"):
                await loop.use_weights(1)

    asyncio.run(stop())


class StarvingEngine(ReversingEngine):
    """Loses its weights in the second advance, until it is given some."""

    num_advances = 0

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        self.num_advances += 1
        return [] if self.lacks_weights() else super().advance(max_steps)

    def lacks_weights(self) -> bool:
        return self.num_advances == 2

    def set_weights_version(self, version: int) -> bool:
        self.num_advances = 10
        return super().set_weights_version(version)


def test_an_engine_that_lost_its_weights_is_not_advanced_until_it_has_the_version_again() -> None:
    async def run() -> list[int]:
        engine, told = StarvingEngine(), asyncio.Event()

        async def tell() -> None:
            told.set()

        async with looping(engine, lacks_weights=engine.lacks_weights) as loop:
            loop.when_starved(tell)
            await loop.use_weights(0)
            engine.num_advances = 0
            (future,) = loop.submit([request(0, 1, 2)])
            await told.wait()
            await loop.drain()  # does not wait for sequences that cannot end
            assert loop.is_starved and engine.num_advances == 2
            await loop.use_weights(0)
            return [completion.sample_id for completion in await future]

    assert asyncio.run(run()) == [0, 1, 2]


def test_an_engine_forgets_samples_that_have_ended_before_it_gets_others() -> None:
    engine = ReversingEngine()

    async def main() -> list[int]:
        async with looping(engine) as loop:
            (turn,) = loop.submit_apart(replace(request(1), continues=True))
            await turn
            await loop.forget((1,))
            (turn,) = loop.submit_apart(request(2))
            await turn
            return engine.forgotten

    assert asyncio.run(main()) == [1]


@pytest.mark.parametrize("first", [1, 2])
def test_m23_a_wave_begins_when_all_open_samples_have_their_answer(first: int) -> None:
    """Whichever sample is answered first, the engine gets the same batches in the same order."""
    engine = ReversingEngine()

    async def main() -> None:
        async with looping(engine, in_waves=True) as loop:
            turns = loop.submit_apart(replace(request(1, 2, 3), continues=True))
            await asyncio.gather(*turns)
            further = replace(request(first), continues=True, first_index=1)
            (early,) = loop.submit_apart(further)
            (new,) = loop.submit([request(9)])
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.batches == [[1, 2, 3]] and not engine.forgotten
            await loop.forget((3,))
            for _ in range(20):
                await asyncio.sleep(0)
            assert engine.batches == [[1, 2, 3]], "one sample still waits for its answer"
            other = replace(request(3 - first), first_index=1)
            (late,) = loop.submit_apart(other)
            await asyncio.gather(early, late, new)

    asyncio.run(main())
    assert engine.batches == [[1, 2, 3], [1, 2, 9]]
    assert engine.forgotten == [3]


def test_m23_a_drain_waits_for_the_waves_of_samples_that_have_begun() -> None:
    engine = ReversingEngine()

    async def main() -> None:
        async with looping(engine, in_waves=True) as loop:
            await asyncio.gather(*loop.submit_apart(replace(request(1, 2), continues=True)))
            draining = asyncio.create_task(loop.drain())
            (first,) = loop.submit_apart(replace(request(2), first_index=1))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not first.done() and not draining.done()
            await loop.forget((1,))
            await asyncio.gather(first, draining)

    asyncio.run(main())
    assert engine.batches == [[1, 2], [2]]
