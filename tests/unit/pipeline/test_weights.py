# SPDX-License-Identifier: Apache-2.0
"""The states of the weights on their way, and the calls that no state allows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tandem.pipeline.weights import FlowRule, WeightFlow
from tandem.planner.virtual_time import run_virtually

TRANSFER_S = 2.0
DRAIN_S = 3.0


class Site:
    """The collaborators of a flow in one object, with a log of (seconds, call)."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []
        self.is_starved = False
        self.starve: Callable[[], Awaitable[None]]

    def when_starved(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Implements ``RolloutLoop``."""
        self.starve = tell

    async def wake(self) -> None:
        """Implements ``GroupBuffer``."""

    def note(self, call: str) -> None:
        """Log a call at its end."""
        self.calls.append((asyncio.get_running_loop().time(), call))

    async def call(self, function: Any, version: int) -> None:
        """Implements ``api.Runtime``."""
        await asyncio.sleep(TRANSFER_S)
        function(version)

    def stage(self, version: int) -> None:
        """Implements ``api.WeightStage``."""
        self.note(f"stage {version}")

    async def use_weights(self, version: int) -> None:
        """Implements ``RolloutLoop``, in no time."""
        self.is_starved = False
        self.note(f"use {version}")

    async def drain(self) -> None:
        """Implements ``RolloutLoop``."""
        await asyncio.sleep(DRAIN_S)
        self.note("drained")

    async def pause(self) -> None:
        """Implements ``RolloutLoop``."""
        self.note("paused")

    async def release_trained(self, count: int) -> None:
        """Implements ``AdmissionGate``."""
        self.note(f"release {count}")


@asynccontextmanager
async def flowing(
    *, is_staged: bool = False, finishes: bool = False, time_shared: bool = False
) -> AsyncIterator[tuple[WeightFlow, Site]]:
    """A flow that runs within the block, from version 0 on."""
    site: Any = Site()
    rule = FlowRule(
        lockstep=False, finishes_on_old_weights=finishes, time_shared=time_shared, batch_size=4
    )
    flow = WeightFlow(
        rule,
        runtime=site,
        stage=site if is_staged else None,
        rollout=site,
        buffer=site,
        gate=site,
        version=0,
    )
    running = asyncio.create_task(flow.run())
    yield flow, site
    running.cancel()


async def train(flow: WeightFlow, version: int, *, is_required: bool = False) -> float:
    """Publish ``version`` and return how long the trainer waited for that."""
    await flow.begin_training()
    begin_s = asyncio.get_running_loop().time()
    await flow.publish(version, is_required=is_required)
    return asyncio.get_running_loop().time() - begin_s


def test_the_trainer_waits_while_its_weights_are_read_and_not_for_the_rest() -> None:
    async def run() -> tuple[float, float, list[tuple[float, str]]]:
        async with flowing(is_staged=True, finishes=True) as (flow, site):
            waited_s = await train(flow, 1)
            required_s = await train(flow, 2, is_required=True)
            return waited_s, required_s, site.calls

    waited_s, required_s, calls = run_virtually(run())
    assert waited_s == TRANSFER_S
    assert required_s == DRAIN_S + TRANSFER_S + DRAIN_S
    assert [call for _, call in calls] == [
        *("stage 1", "drained", "use 1", "release 4"),
        *("stage 2", "drained", "use 2", "release 4"),
    ]


def test_a_version_published_while_sequences_finish_replaces_the_one_before_it() -> None:
    async def run() -> list[tuple[float, str]]:
        async with flowing(finishes=True) as (flow, site):
            assert [await train(flow, version) for version in (1, 2)] == [0, 0]
            await flow.wait_in_use()
            assert flow.in_use == 2
            return site.calls

    assert run_virtually(run()) == [(3, "drained"), (3, "use 2"), (3, "release 8")]


def test_a_pin_keeps_the_version_in_use_and_the_trainer_goes_on() -> None:
    async def run() -> list[tuple[float, str]]:
        async with flowing() as (flow, site):
            flow.pin()
            flow.pin()
            assert [await train(flow, version) for version in (1, 2)] == [0, 0]
            await flow.unpin()
            await asyncio.sleep(1.0)
            assert (flow.in_use, site.calls) == (0, [])
            await flow.unpin()
            await flow.wait_in_use()
            return site.calls

    assert [call for _, call in run_virtually(run())] == ["use 2", "release 8"]


def test_a_pin_keeps_a_trainer_waiting_whose_weights_the_rollout_uses() -> None:
    async def run() -> list[tuple[float, str]]:
        async with flowing(time_shared=True) as (flow, site):
            flow.pin()
            beginning = asyncio.create_task(flow.begin_training())
            await asyncio.sleep(5.0)
            assert not beginning.done()
            await flow.unpin()
            await beginning
            return site.calls

    assert run_virtually(run()) == [(5, "paused")]


def test_no_version_is_waited_for_once_the_run_is_abandoned() -> None:
    async def run() -> tuple[float, int]:
        async with flowing(is_staged=True, finishes=True) as (flow, _):
            await flow.begin_training()
            await flow.abandon()
            begin_s = asyncio.get_running_loop().time()
            await flow.publish(1, is_required=True)
            await flow.wait_in_use()
            return asyncio.get_running_loop().time() - begin_s, flow.in_use

    assert run_virtually(run()) == (0, 0)


def test_calls_out_of_order_are_errors() -> None:
    async def run() -> None:
        async with flowing(finishes=True) as (flow, _):
            with pytest.raises(RuntimeError, match="without a training step"):
                await flow.publish(1, is_required=False)
            await flow.begin_training()
            with pytest.raises(RuntimeError, match="before the last one has published"):
                await flow.begin_training()
            with pytest.raises(RuntimeError, match="without a training step"):
                await flow.publish(0, is_required=False)
            await flow.publish(1, is_required=False)
            with pytest.raises(RuntimeError, match="version 0 is pinned, 1 is published"):
                flow.pin()

    run_virtually(run())


def test_a_rollout_without_weights_gets_those_of_the_trainer_between_two_steps() -> None:
    async def run() -> list[tuple[float, str]]:
        async with flowing(finishes=True) as (flow, site):
            site.is_starved = True
            await site.starve()
            await asyncio.sleep(1.0)  # nobody trains
            flow.pin()
            await flow.begin_training()
            site.is_starved = True
            await site.starve()
            await asyncio.sleep(1.0)
            assert len(site.calls) == 2
            await flow.publish(1, is_required=False)
            await flow.wait_in_use()
            return site.calls

    calls = [call for _, call in run_virtually(run())]
    assert calls == ["use 0", "release 0", "use 1", "release 4"], "it cannot finish sequences"
