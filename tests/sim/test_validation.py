# SPDX-License-Identifier: Apache-2.0
"""Validation woven into training, under the virtual clock: acceptance tests 13, 14 and 15."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore, open_checkpoint
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import simulate
from tests.sim.schedules import (
    BATCH,
    config,
    small_setup,
    spans,
    times,
    trained,
    updates,
    validated,
)

FILES = ("data.val_files=[some]", "data.train_files=[some]")


def test_13_validation_uses_the_weights_of_its_step_whatever_the_timing() -> None:
    """The pipeline itself refuses a validation sample of any other version."""
    rng = random.Random(13)
    for _ in range(50):
        scale = {task: rng.uniform(0, 3) for task in ("actor-train", "sync", "reward")}
        seconds = SimulatedTimes(
            response_s=lambda uid, k: rng.uniform(0.1, 3),
            task_s=lambda task, number, scale=scale: scale.get(task, 0.0) * rng.random(),
            num_slots=rng.randint(2, 20),
            decode_step_s=0.05,
            validation_s=rng.uniform(0.1, 8),
            num_tokens=lambda _: 4,
        )
        lag, frequency = rng.randint(0, 4), rng.randint(1, 4)
        keys = (*FILES, f"trainer.test_freq={frequency}", "trainer.val_before_train=False")
        run = simulate(
            config(lag, *keys, num_steps=7),
            seconds,
            setup=replace(small_setup(7), num_validation_rows=3, stages_weights=rng.random() < 0.5),
        )
        assert validated(run) == sorted({*range(frequency, 8, frequency), 7})
        assert trained(run) == list(range(1, 8))


@pytest.mark.parametrize("frequency", [-1, 0])
@pytest.mark.parametrize("lag", [0, 2])
def test_13_no_frequency_no_validation(lag: int, frequency: int) -> None:
    keys = (*FILES, f"trainer.test_freq={frequency}", "trainer.val_before_train=False")
    run = simulate(
        config(lag, *keys, num_steps=5),
        times(generate=1.0, actor_train=1.0),
        setup=replace(small_setup(5), num_validation_rows=3),
    )
    assert validated(run) == []


@pytest.mark.parametrize("lag", [0, 2])
def test_14_validation_before_training_stands_at_step_0(lag: int) -> None:
    keys = (*FILES, "trainer.test_freq=-1", "trainer.val_before_train=True")
    run = simulate(
        config(lag, *keys, num_steps=3),
        times(generate=1.0, actor_train=1.0),
        setup=replace(small_setup(3), num_validation_rows=3),
    )
    assert validated(run) == [0]
    assert [row.step for _, row in run.rows] == [0, 1, 2, 3]


def test_14_validation_only_trains_nothing() -> None:
    keys = (*FILES, "trainer.val_only=True")
    run = simulate(
        config(2, *keys, num_steps=3),
        times(generate=1.0, actor_train=1.0),
        setup=replace(small_setup(3), num_validation_rows=3),
    )
    assert validated(run) == [0]
    assert not updates(run) and run.summary.last_step == 0
    assert run.summary.validation


def test_15_training_goes_on_while_a_validation_runs() -> None:
    keys = (*FILES, "trainer.test_freq=5", "trainer.val_before_train=False")
    seconds = replace(times(generate=1.0, actor_train=2.0, slots=64), validation_s=5.0)
    run = simulate(
        config(3, *keys, num_steps=12),
        seconds,
        setup=replace(small_setup(12), num_validation_rows=3),
    )
    steps = updates(run)
    (begin, end), *_ = spans(run, "validation", "validation")
    assert end - begin == pytest.approx(5.0, abs=0.1)
    within = [step for step, (since, _) in steps.items() if begin <= since < end]
    assert within == [6, 7, 8]
    assert steps[6][0] - steps[5][1] < 0.1
    assert validated(run) == [5, 10, 12]


def test_15_without_buffered_data_training_waits_and_ends_all_the_same() -> None:
    keys = (*FILES, "trainer.test_freq=1", "trainer.val_before_train=True")
    seconds = replace(times(generate=3.0, actor_train=0.1, sync=0.5), validation_s=20.0)
    run = simulate(
        config(1, *keys, num_steps=4),
        seconds,
        setup=replace(small_setup(4), num_validation_rows=BATCH),
    )
    assert validated(run) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("is_validated", [False, True])
def test_15_a_validation_that_a_failure_cut_off_is_made_up_for(
    is_validated: bool, tmp_path: Path
) -> None:
    """Its step may have been recorded without it."""
    keys = (*FILES, "trainer.test_freq=2", "trainer.save_freq=1", "trainer.val_before_train=False")
    setup = replace(small_setup(5), num_validation_rows=3, store=CheckpointStore(tmp_path))
    seconds = times(generate=1.0, actor_train=1.0)
    simulate(config(1, *keys, num_steps=5), seconds, setup=setup)
    for step, expected in ((2, [2, 4, 5]), (3, [4, 5])):
        checkpoint = open_checkpoint(tmp_path / f"global_step_{step}")
        resumed = simulate(
            config(1, *keys, "trainer.save_freq=0", num_steps=5),
            seconds,
            setup=replace(setup, checkpoint=checkpoint, is_validated=is_validated),
        )
        assert validated(resumed) == (expected if not is_validated else [4, 5])
        assert trained(resumed) == list(range(step + 1, 6))


@pytest.mark.parametrize("lag", [0, 3])
def test_15_a_checkpoint_is_written_after_all_records_of_earlier_steps(
    lag: int, tmp_path: Path
) -> None:
    """A run that goes on from it repeats no validation but that of the checkpoint's own step."""
    keys = (*FILES, "trainer.test_freq=2", "trainer.save_freq=1", "trainer.val_before_train=False")
    seconds = replace(times(generate=1.0, actor_train=2.0, slots=64), validation_s=9.0)
    setup = replace(small_setup(8), num_validation_rows=3, store=CheckpointStore(tmp_path))
    run = simulate(config(lag, *keys, num_steps=8), seconds, setup=setup)
    saves = {int(e.details["step"]): e.begin_s for e in run.events if e.name == "save"}
    assert sorted(saves) == list(range(1, 9)) and validated(run) == [2, 4, 6, 8]
    for step, begin_s in saves.items():
        written = [row for moment, row in run.rows if moment <= begin_s]
        assert [row.step for row in written if row.step < step] == [
            row.step for _, row in run.rows if row.step < step
        ]
