# SPDX-License-Identifier: Apache-2.0
"""How asynchronous runs end, stop and go on, under the virtual clock: acceptance tests 11, 22."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore, open_checkpoint
from tandem.pipeline.simulated_engines import SimulatedTimes
from tandem.pipeline.simulation import SimulatedRun, simulate
from tests.sim.schedules import BATCH, SAMPLES, around, config, lags, times, updates

SAVES = ("trainer.save_freq=1",)


def trained_uids(run: SimulatedRun) -> list[int]:
    """The draws that were trained on, each once for its group, in the order of the steps."""
    return [
        completion.sample_id // SAMPLES
        for step in sorted(run.samples)
        for completion in run.samples[step][::SAMPLES]
    ]


def uneven(seed: int) -> SimulatedTimes:
    """Long and short responses in disorder."""
    rng = random.Random(seed)
    seconds = [rng.choice([0.3, 1.0, 6.0]) for _ in range(200)]
    return SimulatedTimes(
        response_s=lambda uid, k: seconds[(uid * SAMPLES + k) % 200],
        task_s=lambda task, number: {"actor-train": 1.0, "sync": 0.1}.get(task, 0.0),
        num_slots=12,
        decode_step_s=0.01,
        num_tokens=4,
    )


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("num_batches", [1, 9, 10, 11, 14])
def test_11_every_batch_of_the_data_is_trained_on_and_the_run_ends(
    lag: int, num_batches: int
) -> None:
    run = simulate(
        config(lag, "trainer.total_epochs=1", num_steps=1000), uneven(1), around=around(num_batches)
    )
    assert run.summary.last_step == num_batches and not run.summary.stopped_early
    assert sorted(updates(run)) == list(range(1, num_batches + 1))
    assert sorted(trained_uids(run)) == list(range(num_batches * BATCH))
    in_use = [e.details["version"] for e in run.events if e.name == "version in use"]
    assert in_use[-1] == num_batches


@pytest.mark.parametrize("lag", [0, 3])
def test_11_the_number_of_steps_ends_a_run_before_its_data(lag: int) -> None:
    run = simulate(config(lag, num_steps=5), uneven(2), around=around(14))
    assert sorted(updates(run)) == [1, 2, 3, 4, 5]
    assert len(set(trained_uids(run))) == 5 * BATCH


@pytest.mark.parametrize("lag", [0, 2])
def test_11_dropped_groups_are_replaced_until_the_data_ends(lag: int) -> None:
    """Every fourth group has equal rewards and is dropped: 10 batches of data make 7 steps."""
    keys = (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "algorithm.filter_groups.max_num_gen_batches=0",
        "trainer.total_epochs=1",
        "data.shuffle=False",
    )
    surroundings = replace(around(10), score=lambda row, k: 1.0 if row % 4 == 3 else float(k))
    run = simulate(config(lag, *keys, num_steps=10), uneven(3), around=surroundings)
    assert run.summary.last_step == 7 and not run.summary.stopped_early
    assert not [uid for uid in trained_uids(run) if uid % 4 == 3]
    assert len(set(trained_uids(run))) == 7 * BATCH
    assert max(lags(run)) <= lag


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_11_a_run_that_is_stopped_saves_and_leaves(lag: int, tmp_path: Path) -> None:
    for stop_s in (0.0, 3.3, 9.0, 14.2):
        store = CheckpointStore(tmp_path / f"{stop_s}")
        run = simulate(config(lag), uneven(4), around=replace(around(), store=store, stop_s=stop_s))
        assert run.summary.stopped_early
        latest = store.latest()
        assert (0 if latest is None else latest.step) == run.summary.last_step < 24


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_22_no_draw_is_lost_or_repeated_through_any_kill(lag: int, tmp_path: Path) -> None:
    """A run that is killed after step k has left the checkpoint of step k, and that is all."""
    store = CheckpointStore(tmp_path)
    around_store = replace(around(10), store=store)
    whole = simulate(config(lag, *SAVES, num_steps=10), uneven(5), around=around_store)
    before: list[int] = []
    for k in range(1, 10):
        before += [c.sample_id // SAMPLES for c in whole.samples[k][::SAMPLES]]
        checkpoint = open_checkpoint(tmp_path / f"global_step_{k}")
        resumed = simulate(
            config(lag, num_steps=10), uneven(6), around=replace(around(10), checkpoint=checkpoint)
        )
        after = trained_uids(resumed)
        assert sorted(before + after) == list(range(10 * BATCH))
        assert sorted(updates(resumed)) == list(range(k + 1, 11))
        assert min(lags(resumed)) >= 0 and max(lags(resumed)) <= lag
        if lag == 0:
            assert after == list(range(k * BATCH, 10 * BATCH))


@pytest.mark.parametrize("lag", [1, 3])
def test_22_rounds_fix_batches_and_versions_whatever_the_timing(lag: int) -> None:
    keys = ("trainer.deterministic_async=True",)
    runs = [
        simulate(config(lag, *keys, num_steps=8), uneven(s), around=around(8)) for s in (7, 8, 9)
    ]
    assert runs[0].samples == runs[1].samples == runs[2].samples
    for step, completions in runs[0].samples.items():
        assert {c.version_runs for c in completions} == {((max(0, step - 1 - lag), 4),)}
        assert [c.sample_id for c in completions] == list(
            range((step - 1) * BATCH * SAMPLES, step * BATCH * SAMPLES)
        )


def test_22_rounds_still_overlap_generation_and_training() -> None:
    keys = ("trainer.deterministic_async=True",)
    seconds = times(generate=3.0, actor_train=3.0)
    overlapped = simulate(config(1, *keys), seconds, around=around()).step_seconds(after=8)
    assert overlapped == pytest.approx(3.0, rel=0.05)


def test_22_weights_on_their_way_need_not_wait_for_a_sequence_of_a_round_to_end() -> None:
    """A worker takes part in a transfer between two advances, and others wait for it."""
    keys = ("trainer.deterministic_async=True",)
    seconds = times(generate=10.0, actor_train=1.0, decode_step_s=0.01)
    run = simulate(config(1, *keys, num_steps=3), seconds, around=around(3))
    advances = [e for e in run.events if (e.track, e.name) == ("generate/0", "generate")]
    longest = max((e.end_s - e.begin_s) / e.num_calls for e in advances)
    assert longest <= 10.0 / 8


class BrokenRowError(Exception):
    """What a data set can hold."""


@pytest.mark.parametrize("lag", [0, 1])
def test_a15_an_error_of_the_data_ends_the_run_and_is_told(lag: int) -> None:
    """Also one of a batch that is generated ahead of the step under way."""
    seen: list[int] = []

    def score(row: int, k: int) -> float:
        del k
        seen.append(row)
        if len(seen) > 3 * BATCH * SAMPLES:
            raise BrokenRowError(f"row {row}")
        return 1.0

    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(config(lag), uneven(1), around=replace(around(), score=score))
    assert caught.value.subgroup(BrokenRowError) is not None
    assert len(seen) <= 4 * BATCH * SAMPLES, "nothing goes on for long after it"
