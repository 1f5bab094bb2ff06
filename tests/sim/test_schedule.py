# SPDX-License-Identifier: Apache-2.0
"""The schedule of asynchronous runs under the virtual clock: acceptance tests 5, 6, 7 and 9."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import simulate
from tandem.types import GenerationRequest, Group, Prompt
from tests.sim.schedules import (
    APART,
    BATCH,
    SAMPLES,
    config,
    lags,
    num_versions,
    small_setup,
    spans,
    times,
    updates,
)

LOGP_AT_ITS_TURN = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
"""Two optimizer steps a batch: the trainer computes old log-probs before them."""


def random_times(rng: random.Random) -> SimulatedTimes:
    """Durations of an order of magnitude, another one for every call; some responses long."""
    scale = {task: 10 ** rng.uniform(-1, 1) for task in ("actor-train", "sync", "reward")}

    def response_s(uid: int, k: int) -> float:
        tail = 10.0 if rng.random() < 0.1 else 1.0
        return tail * rng.uniform(0.1, 4)

    return SimulatedTimes(
        response_s=response_s,
        task_s=lambda task, number: scale.get(task, 0.0) * rng.uniform(0, 1),
        num_slots=rng.randint(2, 4 * BATCH * SAMPLES),
        decode_step_s=0.02,
        num_tokens=lambda _: 4,
    )


@pytest.mark.parametrize("lag", range(5))
def test_05_no_lag_exceeds_its_bound_on_random_traces(lag: int) -> None:
    rng = random.Random(lag)
    num_steps = 8
    versions: dict[bool, int] = {True: 1, False: 1}
    for _ in range(40):
        partial = rng.random() < 0.7
        settings = (f"actor_rollout_ref.rollout.partial_rollout={partial}",)
        run = simulate(
            config(lag, *settings, num_steps=num_steps),
            random_times(rng),
            setup=replace(small_setup(num_steps), stages_weights=rng.random() < 0.5),
        )
        assert run.summary.last_step == num_steps
        assert min(lags(run)) >= 0
        assert max(lags(run)) <= lag
        trained = [c.sample_id // SAMPLES for step in run.samples.values() for c in step]
        assert sorted(set(trained)) == list(range(num_steps * BATCH))
        assert len(trained) == num_steps * BATCH * SAMPLES
        versions[partial] = max(versions[partial], num_versions(run))
    assert versions[False] == 1, "sequences end under the weights they began with"
    assert (versions[True] > 1) == (lag > 0)


@pytest.mark.parametrize("lag", range(1, 5))
def test_05_the_lag_is_reached_when_generation_is_fast(lag: int) -> None:
    run = simulate(config(lag), times(generate=0.1, actor_train=3.0, sync=0.1), setup=small_setup())
    assert max(lags(run)) == lag


def test_prompts_are_admitted_when_a_row_is_near() -> None:
    """Generation is what is waited for. There are slots for five batches, and rows for one."""
    run = simulate(config(4), times(generate=1.0, actor_train=0.1), setup=small_setup())
    at_once = [e.details["count"] for e in run.events if (e.name, e.begin_s) == ("admitted", 0.0)]
    assert sum(at_once) == 1.5 * BATCH


def test_what_waits_for_a_row_does_not_grow_old() -> None:
    """Beside stragglers of eight times the length, and with rows for five batches or for one."""

    def generate(uid: int, k: int) -> float:
        return 8.0 if (uid % BATCH, k) == (0, 0) else 1.0

    mean_lag = {}
    for rows in (1, 5):
        run = simulate(
            config(4),
            times(generate=generate, actor_train=0.5),
            setup=replace(small_setup(), num_engine_rows=rows * BATCH * SAMPLES),
        )
        mean_lag[rows] = statistics.fmean(lags(run))
    assert mean_lag[1] < mean_lag[5] - 0.3


@pytest.mark.parametrize("key", ["partial_rollout=True", "partial_rollout=False"])
def test_what_generation_does_not_work_it_is_said_to_wait_for(key: str) -> None:
    """Prompts, or in between two versions weights; what is left is their transfer."""
    seconds = times(generate=lambda uid, k: 1.0 + uid % 3, actor_train=3.0, sync=0.5)
    run = simulate(config(2, f"actor_rollout_ref.rollout.{key}"), seconds, setup=small_setup())
    waited = {"admission": 0.0, "sync": 0.0}
    for _, row in run.rows:
        waits = {what: row.metrics.get(f"pipeline/wait_s/generate/{what}", 0.0) for what in waited}
        waited = {what: waited[what] + waits[what] for what in waited}
        work_s = row.metrics["pipeline/busy_s/generate"] + row.metrics["pipeline/busy_s/sync"]
        assert work_s + sum(waits.values()) == pytest.approx(row.metrics["pipeline/wall_s"])
    assert waited["admission"] > 1
    assert (waited["sync"] > 1) == (key == "partial_rollout=False")


def test_06_two_batches_are_generated_within_one_long_update() -> None:
    run = simulate(config(2), times(generate=1.0, actor_train=6.0), setup=small_setup())
    begin, end = updates(run)[1]
    generated = [
        min(until, end) - max(since, begin)
        for since, until in spans(run, "generate/0", "generate")
        if since < end and until > begin
    ]
    assert sum(generated) == pytest.approx(2.0, abs=0.04)  # an advance of 0.032 without all rows
    versions = {c.version_runs for step in (2, 3) for c in run.samples[step]}
    assert versions == {((0, 4),)}


def test_06_a_straggler_costs_the_trainer_nothing_while_batches_are_buffered() -> None:
    straggler = 8 * BATCH

    def generate(uid: int, k: int) -> float:
        return 8.0 if (uid, k) == (straggler, 0) else 1.0

    spread = times(generate=generate, actor_train=3.0, slots=2 * BATCH * SAMPLES)
    run = simulate(config(3), spread, setup=small_setup())
    steps = updates(run)
    idle = [steps[step + 1][0] - steps[step][1] for step in range(5, 23)]
    assert max(idle) < 0.5


def test_a_straggler_keeps_one_of_two_engines_busy_and_not_both() -> None:
    """Every batch has one response of 8 s, which only one engine has to do with."""

    def generate(uid: int, k: int) -> float:
        return 8.0 if (uid % BATCH, k) == (0, 0) else 1.0

    keys = ("trainer.deterministic_async=True",)
    seconds = times(generate=generate, actor_train=0.1)
    for num_engines, idle_share in ((1, 0.0), (2, 7 / 16)):
        run = simulate(
            config(1, *keys, num_steps=12),
            seconds,
            setup=replace(small_setup(12), num_engines=num_engines),
        )
        idle = [row.metrics["pipeline/idle_share/generate"] for _, row in run.rows]
        assert statistics.fmean(idle[2:-1]) == pytest.approx(idle_share, abs=0.03)
        tracks = [f"generate/{number}" for number in range(num_engines)]
        busy = sum(end - begin for t in tracks for begin, end in spans(run, t, "generate"))
        summed = sum(row.metrics["pipeline/busy_s/generate"] for _, row in run.rows)
        assert busy / num_engines == pytest.approx(summed, rel=0.01)


@pytest.mark.parametrize("lag", [1, 2])
def test_the_wait_for_a_batch_is_split_where_its_own_last_sequence_was_generated(lag: int) -> None:
    """Rewards of 5 s, while sequences of later batches end all the time."""
    seconds = times(generate=lambda uid, k: 1.0 + uid % 7 / 7, slots=2, actor_train=0.1, reward=5.0)
    run = simulate(config(lag, num_steps=3), seconds, setup=small_setup(3))
    waits = {row.step: row.metrics for _, row in run.rows}
    assert waits[1]["timing_s/reward"] == pytest.approx(5.0)


Generate = float | Callable[[int, int], float]


def long_tailed(uid: int, k: int) -> float:
    """Batches of 2, 2, 2 and 12 seconds in turn."""
    return (2.0, 2.0, 2.0, 12.0)[uid // BATCH % 4]


@dataclass(frozen=True)
class Case:
    """Seconds of a batch; ``others``: of old log-probs and of the transfer."""

    generate: Generate
    train: float
    others: float
    lag: int
    floor: float


CASES = {
    "balanced": Case(5.0, 4.0, 0.5, lag=1, floor=5.5),
    "bound by training": Case(2.0, 6.0, 0.5, lag=1, floor=7.0),
    "bound by generation": Case(8.0, 3.0, 0.5, lag=1, floor=8.5),
    "long tail": Case(long_tailed, 4.0, 0.5, lag=3, floor=5.0),
    "toy": Case(1.0, 1.0, 0.1, lag=1, floor=1.2),
}


def step_seconds(case: Case, *, lag: int, partial: bool = True) -> float:
    """Of a step in the long run."""
    settings = (*LOGP_AT_ITS_TURN, f"actor_rollout_ref.rollout.partial_rollout={partial}")
    seconds = times(
        generate=case.generate, actor_train=case.train / 2, logp=case.others, sync=case.others
    )
    run = simulate(config(lag, *settings, num_steps=28), seconds, setup=small_setup(28))
    assert max(lags(run)) <= lag
    assert partial or num_versions(run) == 1
    return run.step_seconds(after=12)


@pytest.mark.parametrize("name", CASES)
def test_07_steps_take_hardly_longer_than_any_schedule_could(name: str) -> None:
    case = CASES[name]
    assert 0.99 * case.floor <= step_seconds(case, lag=case.lag) <= 1.05 * case.floor


@pytest.mark.parametrize("name", CASES)
def test_07_sequences_that_end_under_their_weights_cost_time_but_less_than_taking_turns(
    name: str,
) -> None:
    case = CASES[name]
    finishing = step_seconds(case, lag=case.lag, partial=False)
    assert step_seconds(case, lag=case.lag) <= finishing * 1.01
    assert finishing < 0.95 * step_seconds(case, lag=0)


def test_09_nothing_piles_up_behind_a_generator_that_is_far_ahead() -> None:
    alive: dict[int, int] = {}

    def task_s(task: str, number: int) -> float:
        if task == "sync" and number in (20, 480):
            gc.collect()
            kinds = (Group, Prompt, GenerationRequest, asyncio.Task)
            alive[number] = sum(type(one) in kinds for one in gc.get_objects())
        return {"actor-train": 1.0}.get(task, 0.0)

    seconds = SimulatedTimes(lambda uid, k: 0.01, task_s, num_slots=64, decode_step_s=0.1)
    run = simulate(config(4, num_steps=500), seconds, setup=small_setup(500))
    buffered = [row.metrics["pipeline/buffered_groups"] for _, row in run.rows]
    assert max(buffered) <= 4 * BATCH
    assert alive[480] <= alive[20] + 5


def test_10_a_reference_on_devices_of_its_own_leaves_the_critical_path() -> None:
    keys = (*LOGP_AT_ITS_TURN, "actor_rollout_ref.actor.use_kl_loss=True")
    seconds = times(generate=3.0, actor_train=2.0, logp=0.5, ref_logp=1.5, sync=0.2)
    together = (("generate",), ("logp", "ref_logp", "actor-train"))
    shared, apart = (
        simulate(config(2, *keys), seconds, setup=small_setup(groups=groups)).step_seconds(after=10)
        for groups in (together, APART)
    )
    assert shared - apart >= 0.9 * 1.5


def test_10_old_log_probs_on_devices_of_their_own_leave_it_too() -> None:
    seconds = times(generate=3.0, actor_train=2.0, logp=1.5, sync=0.2)
    own = (("generate",), ("logp",), ("actor-train",))
    shared, apart = (
        simulate(config(2, *LOGP_AT_ITS_TURN), seconds, setup=small_setup(groups=groups))
        for groups in (APART, own)
    )
    assert shared.step_seconds(after=10) - apart.step_seconds(after=10) >= 0.9 * 1.5
    # What that costs: the weights there are one version behind.
    for run, behind in ((shared, 0), (apart, 1)):
        lags = [row.metrics["training/lag/old_log_prob"] for _, row in run.rows]
        assert lags[10:] == [behind] * len(lags[10:])
