# SPDX-License-Identifier: Apache-2.0
"""Runs whose episodes wait for tools, under the virtual clock (M14, M15, M21, M31).

Three turns of the policy, and an answer after each of the first two.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tandem.agents.setup import Task
from tandem.data.call_formats import CALL_FORMATS
from tandem.pipeline.conversing import Conversing, TurnLimits
from tandem.planner.simulation import SimulatedRun, SimulatedSetup, simulate
from tandem.types import AssistantTurn, Observation, ToolStatus
from tests.sim.schedules import (
    BATCH,
    SAMPLES,
    config,
    lags,
    small_setup,
    spans,
    times,
    updates,
)

NUM_TURNS = 3
MORE: Any = {"role": "user", "content": "more"}


class Tools:
    """Environments that answer after the seconds that ``seconds`` draws.

    Attributes:
        num_open: the number of episodes whose environments are not closed.
        num_answers: the number of answers so far.
        failed: the samples whose environment has failed.
    """

    def __init__(
        self, seconds: Callable[[], float], *, fails: Callable[[], bool] = lambda: False
    ) -> None:
        self.seconds = seconds
        self.fails = fails
        self.num_open = self.num_answers = 0
        self.failed: set[int] = set()

    def open(self, task: Task) -> Session:
        self.num_open += 1
        return Session(self, task)


class Session:
    def __init__(self, tools: Tools, task: Task) -> None:
        self._tools = tools
        _, self._sample_id = task.episode_id
        self._num_left = NUM_TURNS - 1

    async def step(self, turn: AssistantTurn) -> Observation:
        self._num_left -= 1
        if self._num_left < 0:
            return Observation(done=True)
        await asyncio.sleep(self._tools.seconds())
        self._tools.num_answers += 1
        if self._tools.fails():
            self._tools.failed.add(self._sample_id)
            failed = (ToolStatus.FAILED,)
            return Observation(done=True, statuses=failed, detail="OSError: no connection")
        return Observation((MORE,))

    async def close(self) -> None:
        self._tools.num_open -= 1


class Tokens:
    """A codec and the dialogue of a template, without a tokenizer."""

    eos_ids = ()

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        return ["" for _ in ids]

    def between(self, messages: Sequence[Any], *, last_id: int) -> list[int]:
        return [2, 3]

    def is_surely_longer(self, messages: Sequence[Any], num_tokens: int) -> bool:
        return False


def setup_with(tools: Any, num_steps: int, *, timeout_s: float = 1e9) -> SimulatedSetup:
    tokens: Any = Tokens()
    conversing = Conversing(
        tokens,
        tools,
        CALL_FORMATS["hermes"],
        {},
        TurnLimits(None, None, timeout_s),
        has_users=True,
        dialogues={"[]": tokens},
    )
    return replace(small_setup(num_steps), conversing=conversing)


def one_in_ten(rng: random.Random, *, usual_s: float) -> Callable[[], float]:
    """One call in ten takes 50 times as long."""
    return lambda: usual_s * (50 if rng.random() < 0.1 else 1)


@pytest.mark.parametrize(
    ("generate_s", "train_s"), [(0.2, 4.0), (1.0, 0.5)], ids=["bound by training", "by generation"]
)
def test_m31_slow_tools_cost_no_time_if_others_fill_it(generate_s: float, train_s: float) -> None:
    """No schedule is faster than the trainer, or than the rows of the engine."""
    tools = Tools(one_in_ten(random.Random(1), usual_s=0.2))
    lag, num_steps = 8, 44
    seconds = times(
        generate=generate_s,
        actor_train=train_s,
        sync=0.1,
        slots=BATCH * SAMPLES // 2,
        decode_step_s=0.01,
    )
    bound_s = max(train_s, NUM_TURNS * generate_s * 2) + 0.1
    taken = {}
    for ahead in (0, lag):
        run = simulate(
            config(ahead, num_steps=num_steps), seconds, setup=setup_with(tools, num_steps)
        )
        taken[ahead] = run.step_seconds(after=12, through=num_steps - lag)
        assert max(lags(run)) <= ahead
    assert 0.99 * bound_s <= taken[lag] <= 1.1 * bound_s
    assert taken[0] > 2 * bound_s, "waiting for each batch"
    assert tools.num_open == 0


DEEP = pytest.param(2, 1250, marks=pytest.mark.deep, id="10,000 episodes")


@pytest.mark.parametrize(("lag", "num_steps"), [(0, 40), (1, 60), (4, 60), DEEP])
def test_m15_heavy_tails_block_nothing_and_every_prompt_is_trained_on_once(
    lag: int, num_steps: int
) -> None:
    """Tools take a second, or a hundred times as long; episodes may take 60 s after a turn."""
    rng = random.Random(lag)
    tools = Tools(lambda: rng.paretovariate(1.1))
    run = simulate(
        config(lag, num_steps=num_steps),
        times(
            generate=lambda uid, k: rng.uniform(0.1, 2.0),
            actor_train=2.0,
            sync=0.2,
            slots=24,
            decode_step_s=0.01,
        ),
        setup=setup_with(tools, num_steps, timeout_s=60.0),
    )
    assert run.summary.last_step == num_steps
    assert tools.num_answers > 0.9 * (NUM_TURNS - 1) * num_steps * BATCH * SAMPLES
    assert tools.num_open == 0
    assert 0 <= min(lags(run)) <= max(lags(run)) <= lag
    assert trained_samples(run) == list(range(num_steps * BATCH * SAMPLES))
    late = sum(row.metrics.get("agent/failed", 0.0) for _, row in run.rows)
    assert 0 < late == sum(row.metrics.get("reward/timeouts", 0.0) for _, row in run.rows)


@pytest.mark.parametrize("lag", [0, 2])
def test_m14_exactly_the_episodes_that_fail_are_counted_and_have_no_reward(lag: int) -> None:
    """One answer in twenty is a failure of the environment."""
    rng = random.Random(lag)
    num_steps = 30
    tools = Tools(lambda: 0.2, fails=lambda: rng.random() < 0.05)
    run = simulate(
        config(lag, num_steps=num_steps),
        times(generate=0.2, actor_train=1.0, sync=0.1, slots=24),
        setup=setup_with(tools, num_steps),
    )
    rows = {row.step: row.metrics for _, row in run.rows if row.step}
    assert trained_samples(run) == list(range(num_steps * BATCH * SAMPLES))
    num_failed = 0
    for step, metrics in rows.items():
        failed = {one.sample_id for one in run.samples[step]} & tools.failed
        assert metrics["agent/failed"] == len(failed) == metrics["reward/errors"]
        num_failed += len(failed)
    assert num_failed == len(tools.failed) > num_steps * BATCH * SAMPLES / 50


def trained_samples(run: SimulatedRun) -> list[int]:
    """Return the samples that were trained on, each once for its first turn."""
    found: list[int] = []
    for step in sorted(run.samples):
        ids = [one.sample_id for one in run.samples[step]]
        assert len(set(ids)) == BATCH * SAMPLES
        found += dict.fromkeys(ids)
    return sorted(found)


def test_m21_an_engine_works_while_others_wait_for_tools() -> None:
    """32 episodes on 8 rows, with turns of 0.1 s and tools of 0.2 s."""
    keys = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    run = simulate(
        config(0, *keys, num_steps=1),
        times(generate=0.1, actor_train=1.0, slots=8),
        setup=replace(setup_with(Tools(lambda: 0.2), 1), num_rows=16),
    )
    (begin_s, _) = updates(run)[1]
    busy_s = sum(end - begin for begin, end in spans(run, "generate/0", "generate"))
    assert len({one.sample_id for one in run.samples[1]}) == 32
    assert 1 - busy_s / begin_s < 0.2
