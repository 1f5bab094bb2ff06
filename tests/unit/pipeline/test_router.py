# SPDX-License-Identifier: Apache-2.0
"""The router: groups complete whatever the order of their samples, and nothing gets lost."""

import asyncio
from collections.abc import Sequence

import pytest

from tandem.pipeline.router import RolloutRouter
from tandem.runtime.inprocess import InProcessRuntime
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)


class ReversingEngine:
    """Finishes one sequence an advance, the newest first."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.batches: list[list[int]] = []

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        ids = [i for request in requests for i in request.sample_ids]
        self.batches.append(ids)
        self.waiting.extend(ids)

    def advance(self) -> list[Completion]:
        if not self.waiting:
            return []
        sample_id = self.waiting.pop()
        return [Completion(sample_id, (sample_id,), (-0.5,), FinishReason.STOP, 0)]

    def set_weights_version(self, version: int) -> None:
        raise AssertionError("not used here")


class ForgetfulEngine(ReversingEngine):
    """Accepts work and then knows of none."""

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.batches.append([])


def request(*sample_ids: int) -> GenerationRequest:
    return GenerationRequest(sample_ids=sample_ids, prompt_ids=(1, 2), sampling=SAMPLING)


async def generate(engine: ReversingEngine, requests: list[GenerationRequest]) -> list[list[int]]:
    runtime = InProcessRuntime()
    router = RolloutRouter(engine, runtime, clock=lambda: 0.0)
    results: list[list[int]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            driver = tasks.create_task(router.run())
            for future in router.submit(requests):
                results.append([completion.sample_id for completion in await future])
            driver.cancel()
    finally:
        await runtime.close()
    return results


def test_groups_come_back_whole_and_in_order() -> None:
    engine = ReversingEngine()
    results = asyncio.run(generate(engine, [request(0, 1, 2), request(3, 4)]))
    assert results == [[0, 1, 2], [3, 4]]


def test_requests_submitted_together_are_added_together() -> None:
    engine = ReversingEngine()
    asyncio.run(generate(engine, [request(0, 1), request(2, 3)]))
    assert engine.batches == [[0, 1, 2, 3]]


def test_a_lost_sequence_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(generate(ForgetfulEngine(), [request(0)]))
    assert "lost 1 of its sequences" in str(caught.value.exceptions[0])
