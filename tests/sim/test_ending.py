# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs end, stop and resume, under the virtual clock: acceptance tests 11 and 22."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import CheckpointStore, open_checkpoint
from tandem.config.schema.data import DataConfig
from tandem.data.ledger import Source, open_source
from tandem.errors import UserError
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import SimulatedRun, simulate
from tandem.types import Prompt
from tests.sim.schedules import (
    APART,
    BATCH,
    SAMPLES,
    config,
    lags,
    small_setup,
    times,
    trained,
    updates,
    validated,
)

SAVES = ("trainer.save_freq=1",)


def trained_uids(run: SimulatedRun) -> list[int]:
    """Return the draws that were trained on, once for each group, in the order of the steps."""
    return [
        completion.sample_id // SAMPLES
        for step in sorted(run.samples)
        for completion in run.samples[step][::SAMPLES]
    ]


def uneven(seed: int) -> SimulatedTimes:
    """Return times with long and short responses in random order."""
    rng = random.Random(seed)
    seconds = [rng.choice([0.3, 1.0, 6.0]) for _ in range(200)]
    return SimulatedTimes(
        response_s=lambda uid, k: seconds[(uid * SAMPLES + k) % 200],
        task_s=lambda task, number: {"actor-train": 1.0, "sync": 0.1}.get(task, 0.0),
        num_slots=12,
        decode_step_s=0.01,
        num_tokens=lambda _: 4,
    )


@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("num_batches", [1, 9, 10, 11, 14])
def test_11_every_batch_of_the_data_is_trained_on_and_the_run_ends(
    lag: int, num_batches: int
) -> None:
    run = simulate(
        config(lag, "trainer.total_epochs=1", num_steps=1000),
        uneven(1),
        setup=small_setup(num_batches),
    )
    assert run.summary.last_step == num_batches and not run.summary.stopped_early
    assert sorted(updates(run)) == list(range(1, num_batches + 1))
    assert sorted(trained_uids(run)) == list(range(num_batches * BATCH))
    in_use = [e.details["version"] for e in run.events if e.name == "version in use"]
    assert in_use[-1] == num_batches


@pytest.mark.parametrize("lag", [0, 3])
def test_11_the_number_of_steps_ends_a_run_before_its_data(lag: int) -> None:
    run = simulate(config(lag, num_steps=5), uneven(2), setup=small_setup(14))
    assert sorted(updates(run)) == [1, 2, 3, 4, 5]
    assert len(set(trained_uids(run))) == 5 * BATCH


DROPS = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "trainer.total_epochs=1",
    "data.shuffle=False",
)
VALIDATES = ("data.val_files=[some]", "data.train_files=[some]", "trainer.val_before_train=False")


def every_fourth_alike(row: int, k: int) -> float:
    """Return rewards that are equal in every fourth group, so that it is dropped."""
    return 1.0 if row % 4 == 3 else float(k)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("test_freq", [0, 3, 7, 100])
def test_11_dropped_groups_are_replaced_until_the_data_ends(lag: int, test_freq: int) -> None:
    """Every fourth group has equal rewards and is dropped: 10 batches of data make 7 steps. The
    seventh is validated, although nothing tells before its end that it is the last.
    """
    keys = (*DROPS, *VALIDATES, f"trainer.test_freq={test_freq}")
    setup = replace(small_setup(10), score=every_fourth_alike, num_validation_rows=3)
    run = simulate(config(lag, *keys, num_steps=10), uneven(3), setup=setup)
    assert run.summary.last_step == 7 and not run.summary.stopped_early
    assert trained(run) == list(range(1, 8))
    expected = {0: [], 3: [3, 6, 7]}.get(test_freq, [7])
    assert validated(run) == expected
    assert not [uid for uid in trained_uids(run) if uid % 4 == 3]
    assert len(set(trained_uids(run))) == 7 * BATCH
    assert max(lags(run)) <= lag


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("groups", [APART, (("generate", "logp", "actor-train"), ("ref_logp",))])
def test_11_prompts_that_fill_no_batch_are_counted_and_stay_open(
    lag: int, groups: tuple[tuple[str, ...], ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """30 of 40 groups are informative: 7 batches of 4 and 2 left over. More epochs draw those."""
    store = CheckpointStore(tmp_path)
    setup = replace(small_setup(10, groups), score=every_fourth_alike, store=store)
    keys = (*DROPS, "trainer.save_freq=100")
    run = simulate(config(lag, *keys, num_steps=10), uneven(3), setup=setup)
    assert run.summary.last_step == 7 and run.summary.num_left == 2
    assert "; 2 prompt(s) are left over" in caplog.text
    checkpoint = open_checkpoint(tmp_path / "global_step_7")
    ledger = checkpoint.read_state()["data"]
    informative = [uid for uid in range(40) if uid % 4 != 3]
    assert sorted([*trained_uids(run), *ledger["open"]]) == informative
    again = simulate(
        config(lag, *keys, "trainer.total_epochs=2", num_steps=10),
        uneven(4),
        setup=replace(setup, checkpoint=checkpoint),
    )
    assert set(ledger["open"]) <= set(trained_uids(again))
    assert again.summary.num_left == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_11_a_step_is_recorded_at_its_end_whether_or_not_it_is_the_last(
    lag: int, tmp_path: Path
) -> None:
    """A stop loses no record either."""
    keys = (*DROPS, *VALIDATES, "trainer.test_freq=100", "trainer.save_freq=100")
    seconds = times(generate=10.0, actor_train=1.0)
    store = CheckpointStore(tmp_path)
    setup = replace(small_setup(10), store=store, num_validation_rows=3)
    run = simulate(config(lag, *keys, num_steps=10), seconds, setup=setup)
    ends = {step: end for step, (_, end) in updates(run).items()}
    assert trained(run) == sorted(ends)
    for moment, row in run.rows:
        if "training/epoch" in row.metrics:
            assert ends[row.step] <= moment <= ends[row.step] + 0.1
    stopped = simulate(
        config(lag, *keys, num_steps=10), seconds, setup=replace(setup, stop_s=ends[3] + 1)
    )
    assert trained(stopped) == list(range(1, stopped.summary.last_step + 1))
    assert validated(stopped) == []


def test_11_a_stop_waits_for_no_last_validation_either(tmp_path: Path) -> None:
    """The run is stopped after the data have ended, while the last weights are on their way."""
    keys = (*DROPS, *VALIDATES, "trainer.test_freq=100")
    setup = replace(
        small_setup(10),
        score=every_fourth_alike,
        num_validation_rows=3,
        store=CheckpointStore(tmp_path),
        stages_weights=True,
    )
    seconds = replace(times(generate=1.0, actor_train=1.0, sync=5.0), validation_s=100.0)
    whole = simulate(config(2, *keys, num_steps=10), seconds, setup=setup)
    assert whole.end_s > 100
    ended_s = updates(whole)[7][1]
    for stop_s in (ended_s + 1.0, ended_s + 6.0, ended_s + 50.0):
        store = CheckpointStore(tmp_path / f"{stop_s}")
        run = simulate(
            config(2, *keys, num_steps=10),
            seconds,
            setup=replace(setup, store=store, stop_s=stop_s),
        )
        assert run.end_s <= stop_s + 5.1 and run.summary.stopped_early
        assert trained(run) == list(range(1, 8)) and not validated(run)


@pytest.mark.parametrize("lag", [0, 2])
def test_11_a_run_whose_data_has_ended_is_not_validated_again(lag: int, tmp_path: Path) -> None:
    keys = (*DROPS, *VALIDATES, "trainer.test_freq=100", "trainer.save_freq=100")
    store = CheckpointStore(tmp_path)
    setup = replace(small_setup(10), score=every_fourth_alike, num_validation_rows=3, store=store)
    simulate(config(lag, *keys, num_steps=10), uneven(3), setup=setup)
    resumed = simulate(
        config(lag, *keys, num_steps=10),
        uneven(3),
        setup=replace(setup, checkpoint=open_checkpoint(tmp_path / "global_step_7")),
    )
    assert resumed.rows == () and resumed.summary.last_step == 7


@pytest.mark.parametrize(
    "keys",
    [
        ("trainer.async_pipeline=False", "trainer.generate_ahead_steps=0"),
        (),
        ("actor_rollout_ref.rollout.partial_rollout=False",),
        ("trainer.deterministic_async=True",),
    ],
    ids=["synchronous", "partial", "whole", "rounds"],
)
@pytest.mark.parametrize("stop_s", [0.5, 9.0, 15.5])
def test_11_a_stop_waits_for_no_validation(
    keys: tuple[str, ...], stop_s: float, tmp_path: Path
) -> None:
    """A resumed run repeats the dropped validations: before training, and of steps 2 and 4."""
    settings = (*VALIDATES[:2], "trainer.val_before_train=True", "trainer.test_freq=2", *keys)
    lag = 0 if "trainer.async_pipeline=False" in keys else 2
    store = CheckpointStore(tmp_path)
    setup = replace(small_setup(6), num_validation_rows=3, store=store)
    seconds = replace(times(generate=1.0, actor_train=1.0), validation_s=7.0)
    stopped = simulate(
        config(lag, *settings, num_steps=6), seconds, setup=replace(setup, stop_s=stop_s)
    )
    assert stopped.summary.stopped_early
    assert stopped.end_s <= stop_s + 1.1, "an update under way ends"
    assert trained(stopped) == list(range(1, stopped.summary.last_step + 1))
    whole = replace(seconds, validation_s=0.1)
    latest = store.latest()
    resumed = simulate(
        config(lag, *settings, num_steps=6),
        whole,
        setup=replace(setup, checkpoint=latest, is_validated=False),
    )
    since = stopped.summary.last_step
    assert validated(resumed) == [step for step in (0, 2, 4, 6) if step >= since]


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.rollout.partial_rollout=False", "trainer.deterministic_async=True"]
)
def test_11_a_stop_waits_for_no_weights_that_wait_for_sequences(key: str, tmp_path: Path) -> None:
    """In lockstep, or for a validation, weights come into use when sequences have ended."""
    keys = (*VALIDATES, "trainer.test_freq=2", key)
    seconds = times(generate=lambda uid, k: 1.0 if uid < 2 * BATCH else 300.0, actor_train=1.0)
    setup = replace(small_setup(), num_validation_rows=3, store=CheckpointStore(tmp_path))
    run = simulate(config(2, *keys), seconds, setup=replace(setup, stop_s=20.0))
    assert run.summary.stopped_early and run.summary.last_step in (1, 2)
    assert run.end_s <= 21.1


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_11_a_run_that_is_stopped_saves_and_leaves(lag: int, tmp_path: Path) -> None:
    for stop_s in (0.0, 3.3, 9.0, 14.2):
        store = CheckpointStore(tmp_path / f"{stop_s}")
        run = simulate(
            config(lag), uneven(4), setup=replace(small_setup(), store=store, stop_s=stop_s)
        )
        assert run.summary.stopped_early
        latest = store.latest()
        assert (0 if latest is None else latest.step) == run.summary.last_step < 24


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_22_no_draw_is_lost_or_repeated_through_any_kill(lag: int, tmp_path: Path) -> None:
    """A run that is killed after step k has left the checkpoint of step k, and that is all."""
    store = CheckpointStore(tmp_path)
    with_store = replace(small_setup(10), store=store)
    whole = simulate(config(lag, *SAVES, num_steps=10), uneven(5), setup=with_store)
    before: list[int] = []
    for k in range(1, 10):
        before += [c.sample_id // SAMPLES for c in whole.samples[k][::SAMPLES]]
        checkpoint = open_checkpoint(tmp_path / f"global_step_{k}")
        resumed = simulate(
            config(lag, num_steps=10),
            uneven(6),
            setup=replace(small_setup(10), checkpoint=checkpoint),
        )
        after = trained_uids(resumed)
        assert sorted(before + after) == list(range(10 * BATCH))
        assert sorted(updates(resumed)) == list(range(k + 1, 11))
        assert min(lags(resumed)) >= 0 and max(lags(resumed)) <= lag
        if lag == 0:
            assert after == list(range(k * BATCH, 10 * BATCH))


@pytest.mark.parametrize("lag", [0, 2])
def test_22_a_group_that_was_dropped_is_not_generated_again(lag: int, tmp_path: Path) -> None:
    """The rows that a resumed run generates for are all but those trained on or dropped before."""
    store = CheckpointStore(tmp_path)
    setup = replace(small_setup(10), score=every_fourth_alike, store=store)
    whole = simulate(config(lag, *DROPS, *SAVES, num_steps=10), uneven(5), setup=setup)
    num_done = 0
    for (_, row), k in zip(whole.rows[:-1], range(1, 7), strict=True):
        num_done += BATCH + int(row.metrics["training/dropped_groups"])
        last_uid = whole.samples[k][-1].sample_id // SAMPLES
        assert num_done == last_uid + 1 or lag > 0, "the rows up to the last one in the batch"
        generated: list[int] = []

        def score(row: int, k: int, *, generated: list[int] = generated) -> float:
            generated.append(row)
            return every_fourth_alike(row, k)

        checkpoint = open_checkpoint(tmp_path / f"global_step_{k}")
        simulate(
            config(lag, *DROPS, num_steps=10),
            uneven(6),
            setup=replace(small_setup(10), score=score, checkpoint=checkpoint),
        )
        assert len(set(generated)) == 10 * BATCH - num_done
        assert len(generated) == len(set(generated)) * SAMPLES
    assert num_done > 6 * BATCH


@pytest.mark.parametrize("lag", [0, 2])
def test_22_the_coefficient_of_the_kl_goes_on_where_it_was(lag: int, tmp_path: Path) -> None:
    """It falls with every step, because the policy stays at the reference."""
    control = "{type:adaptive,kl_coef:0.5,target_kl:0.1,horizon:16}"
    keys = ("algorithm.use_kl_in_reward=True", f"algorithm.kl_ctrl={control}")

    def coefficients(run: SimulatedRun) -> dict[int, float]:
        name = "actor/reward_kl_penalty_coeff"
        return {row.step: row.metrics[name] for _, row in run.rows}

    setup = replace(small_setup(6), store=CheckpointStore(tmp_path))
    whole = simulate(config(lag, *keys, *SAVES, num_steps=6), uneven(5), setup=setup)
    falling = {step: 0.5 * (1 - 0.2 * BATCH * SAMPLES / 16) ** (step - 1) for step in range(1, 7)}
    assert coefficients(whole) == pytest.approx(falling)
    checkpoint = open_checkpoint(tmp_path / "global_step_3")
    resumed = simulate(
        config(lag, *keys, num_steps=6),
        uneven(6),
        setup=replace(small_setup(6), checkpoint=checkpoint),
    )
    assert coefficients(resumed) == pytest.approx({step: falling[step] for step in (4, 5, 6)})


@pytest.mark.parametrize("lag", [1, 3])
def test_22_rounds_fix_batches_and_versions_whatever_the_timing(lag: int) -> None:
    keys = ("trainer.deterministic_async=True",)
    runs = [
        simulate(config(lag, *keys, num_steps=8), uneven(s), setup=small_setup(8))
        for s in (7, 8, 9)
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
    overlapped = simulate(config(1, *keys), seconds, setup=small_setup()).step_seconds(after=8)
    assert overlapped == pytest.approx(3.0, rel=0.05)


def test_22_weights_on_their_way_need_not_wait_for_a_sequence_of_a_round_to_end() -> None:
    """A worker takes part in a transfer between two advances, and others wait for it."""
    keys = ("trainer.deterministic_async=True",)
    seconds = times(generate=10.0, actor_train=1.0, decode_step_s=0.01)
    run = simulate(config(1, *keys, num_steps=3), seconds, setup=small_setup(3))
    advances = [e for e in run.events if (e.track, e.name) == ("generate/0", "generate")]
    longest = max((e.end_s - e.begin_s) / e.num_calls for e in advances)
    assert longest <= 10.0 / 8


class BrokenRowError(Exception):
    """An error of reading a row of the data."""


class BrokenEntry:
    """A ``ledger.Entry`` that cannot be read when it is drawn."""

    pictures = ()

    def as_draw(self, uid: int) -> Prompt:
        raise BrokenRowError(f"draw {uid}")


class WrongEntry:
    """A row whose prompt cannot be used."""

    pictures = ()

    def as_draw(self, uid: int) -> Prompt:
        """Raise UserError."""
        raise UserError("data.train_files", rule=f"draw {uid} is too long", remedy="Cut it.")


@pytest.mark.parametrize(("lag", "num_scored"), [(0, 3), (1, 2)])
def test_a15_an_error_of_reading_data_ends_the_run_and_is_told(
    lag: int, num_scored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth batch, which a run that is one step off draws before the third has ended."""
    broken = 4 * BATCH - 1
    scored: list[int] = []

    def open_broken(entries: list[Any], data: DataConfig, *, total_epochs: int) -> Source[Prompt]:
        source = open_source(entries, data, total_epochs=total_epochs)
        entries[broken] = BrokenEntry()
        return source

    def score(row: int, k: int) -> float:
        scored.append(row)
        return float(k)

    monkeypatch.setattr("tandem.planner.simulation.open_source", open_broken)
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(
            config(lag, "data.shuffle=False"),
            uneven(1),
            setup=replace(small_setup(), score=score),
        )
    assert caught.value.subgroup(BrokenRowError) is not None
    assert sorted(set(scored)) == list(range(num_scored * BATCH)), "nothing goes on after it"


@pytest.mark.parametrize("lag", [0, 1])
def test_a15_a_prompt_that_cannot_be_used_ends_the_run_after_its_last_step_is_saved(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt of a large set is only known when it is drawn."""

    def open_broken(entries: list[Any], data: DataConfig, *, total_epochs: int) -> Source[Prompt]:
        source = open_source(entries, data, total_epochs=total_epochs)
        entries[5 * BATCH - 1] = WrongEntry()
        return source

    monkeypatch.setattr("tandem.planner.simulation.open_source", open_broken)
    setup = replace(small_setup(), store=CheckpointStore(tmp_path))
    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(config(lag, "data.shuffle=False"), uneven(1), setup=setup)
    assert caught.value.subgroup(UserError) is not None
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None and latest.step >= 2


@pytest.mark.parametrize("lag", [0, 1])
def test_a_reward_that_cannot_be_computed_ends_the_run_and_is_told(lag: int) -> None:
    """Not a reward that fails, which is a result."""
    seen: list[int] = []

    def score(row: int, k: int) -> float:
        del k
        seen.append(row)
        if len(seen) > 3 * BATCH * SAMPLES:
            raise BrokenRowError(f"row {row}")
        return 1.0

    with pytest.raises(BaseExceptionGroup) as caught:
        simulate(config(lag), uneven(1), setup=replace(small_setup(), score=score))
    assert caught.value.subgroup(BrokenRowError) is not None
    assert len(seen) <= 4 * BATCH * SAMPLES, "nothing goes on for long after it"
