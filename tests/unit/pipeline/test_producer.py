# SPDX-License-Identifier: Apache-2.0
"""Groups that end together: the rewards of the first do not wait for the texts of the last."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.metrics.activity import Activity
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import BatchRule, GroupBuffer
from tandem.pipeline.producer import GroupProducer
from tandem.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardOutcome,
    RewardRequest,
    RewardStatus,
)

BATCH = 8
KEYS = (f"data.train_batch_size={BATCH}", "actor_rollout_ref.rollout.n=2")


class World:
    """Prompts, texts and rewards, and in which order they were asked for."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def draw(self, count: int) -> list[Prompt]:
        return [Prompt(uid, uid, (1,), "", "source", uid) for uid in range(count)]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        self.events.append(("decoded", ids[0][0]))
        return [str(one[0]) for one in ids]

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        assert {r.solution for r in requests} == {str(requests[0].ground_truth)}
        await asyncio.sleep(0)
        self.events.append(("scored", requests[0].ground_truth))
        return [RewardOutcome(RewardStatus.VALUE, float(k)) for k in range(len(requests))]


class Rollout:
    """Completes everything at the same moment. The token of a response is its prompt's uid."""

    def submit(
        self, requests: Sequence[GenerationRequest]
    ) -> list[asyncio.Future[tuple[Completion, ...]]]:
        futures = []
        for uid, request in enumerate(requests):
            future = asyncio.get_running_loop().create_future()
            future.set_result(
                tuple(
                    Completion(i, (uid,), (-0.5,), FinishReason.STOP, 0) for i in request.sample_ids
                )
            )
            futures.append(future)
        return futures

    async def room(self) -> int | None:
        return None


def test_rewards_of_the_first_group_come_back_before_the_last_text_is_made() -> None:
    async def produce() -> list[tuple[str, int]]:
        world = World()
        parts: Any = SimpleNamespace(
            config=load_config(RunConfig, KEYS).config,
            source=world,
            codec=world,
            rewards=world,
            trace=TraceRecorder(lambda: 0.0, sink=None),
            activity=Activity(),
            conversing=None,
            clock=lambda: 0.0,
        )
        rollout: Any = Rollout()
        gate = AdmissionGate(BATCH, BATCH)
        buffer = GroupBuffer(BatchRule(BATCH, max_lag=0, passes_over=False))
        producer = GroupProducer(
            parts, gate=gate, rollout=rollout, buffer=buffer, version=lambda: 0
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(producer.run())
            batch = await buffer.take(0)
            await gate.release_trained(BATCH)
        assert [[s.reward.score for s in scored.samples] for scored in batch] == [
            [0.0, 1.0]
        ] * BATCH
        return world.events

    events = asyncio.run(produce())
    assert events.index(("scored", 0)) < events.index(("decoded", BATCH - 1))
    assert len(events) == 2 * BATCH
