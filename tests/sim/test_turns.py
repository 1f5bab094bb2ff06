# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout share devices, under the virtual clock.

Generation pauses from the begin of a training step until its weights are in use, and then goes on.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import SimulatedRun, simulate
from tests.sim.schedules import BATCH, SAMPLES, config, lags, small_setup, spans, times, validated

SHARED = (("generate", "logp", "actor-train", "ref_logp"),)
TWO_STEPS = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
"""Two optimizer steps a batch, between which the weights are of no version."""
VALIDATED = ("trainer.test_freq=3", "data.val_files=[some]")


def random_times(rng: random.Random) -> SimulatedTimes:
    scale = {task: 10 ** rng.uniform(-1, 1) for task in ("actor-train", "sync", "reward", "logp")}
    return SimulatedTimes(
        response_s=lambda uid, k: (10.0 if rng.random() < 0.1 else 1.0) * rng.uniform(0.1, 4),
        task_s=lambda task, number: scale.get(task, 0.0) * rng.uniform(0, 1),
        num_slots=rng.randint(2, 4 * BATCH * SAMPLES),
        decode_step_s=0.02,
        num_tokens=lambda _: 4,
        validation_s=rng.uniform(0.1, 4),
    )


def between_versions(run: SimulatedRun) -> list[tuple[float, float]]:
    """Return the spans from a step's first update until its weights are in use."""
    in_use = {
        int(e.details["version"]): e.begin_s for e in run.events if e.name == "version in use"
    }
    begins = {int(e.details["step"]): e.begin_s for e in run.events if e.name == "update"}
    return [(begin_s, in_use[step]) for step, begin_s in begins.items()]


@pytest.mark.parametrize("lag", [1, 2, 4])
@pytest.mark.parametrize("keys", [(), TWO_STEPS])
def test_nothing_is_generated_between_two_versions(lag: int, keys: tuple[str, ...]) -> None:
    rng = random.Random(lag)
    num_steps = 8
    for _ in range(20):
        run = simulate(
            config(lag, *keys, *VALIDATED, num_steps=num_steps),
            random_times(rng),
            setup=replace(small_setup(num_steps, SHARED), num_validation_rows=3),
        )
        assert run.summary.last_step == num_steps
        assert min(lags(run)) >= 0 and max(lags(run)) <= lag
        pauses = between_versions(run)
        assert len(pauses) == num_steps
        for begin_s, end_s in pauses:
            for since_s, until_s in spans(run, "generate/0", "generate"):
                assert until_s <= begin_s + 1e-9 or since_s >= end_s - 1e-9
        assert validated(run) == [0, 3, 6, num_steps]


def test_the_next_sequences_fill_the_time_of_stragglers() -> None:
    """A batch takes 1 s of all slots, but one of its responses 8 s of one; a training step 4 s. In
    step a step takes 8 + 4; in turns generation goes on with the next batches meanwhile.
    """

    def generate(uid: int, k: int) -> float:
        return 8.0 if (uid % BATCH, k) == (0, 0) else 1.0

    seconds = times(generate=generate, actor_train=4.0, slots=2 * BATCH * SAMPLES)
    taken = {}
    for lag in (0, 4):
        run = simulate(config(lag), seconds, setup=small_setup(groups=SHARED))
        taken[lag] = statistics.fmean(row.metrics["timing_s/step"] for _, row in run.rows[8:])
    assert taken[0] == pytest.approx(8 + 4, rel=0.02)
    assert taken[4] < 0.6 * taken[0]
    assert taken[4] >= 4 + 1


def test_a_stop_does_not_wait_for_a_validation_to_begin_another_step(tmp_path: Path) -> None:
    """The validation before training takes 100 s, the first batch is there after 3."""
    seconds = replace(times(generate=3.0, actor_train=50.0), validation_s=100.0)
    setup = replace(
        small_setup(6, SHARED), store=CheckpointStore(tmp_path), num_validation_rows=2, stop_s=20.0
    )
    run = simulate(config(2, *VALIDATED, num_steps=6), seconds, setup=setup)
    assert run.summary.stopped_early and run.summary.last_step == 0
    assert run.end_s < 20 + 1


@pytest.mark.parametrize("stop_s", [0.5, 10.0, 40.0, 56.0, 57.5, 62.0])
def test_a_stop_ends_a_run_at_the_next_step_whichever_task_is_paused(
    stop_s: float, tmp_path: Path
) -> None:
    slow = times(generate=3.0, actor_train=50.0, sync=5.0)
    setup = replace(
        small_setup(6, SHARED),
        store=CheckpointStore(tmp_path),
        num_validation_rows=2,
        stop_s=stop_s,
    )
    keys = (*VALIDATED, "trainer.save_freq=100")
    run = simulate(
        config(2, *keys, num_steps=6),
        replace(slow, validation_s=4.0),
        setup=setup,
    )
    assert run.summary.stopped_early and run.summary.last_step < 3
    assert run.end_s <= stop_s + 50 + 5 + 1
