# SPDX-License-Identifier: Apache-2.0
"""The search of the planner on formulas, and what the simulated pipeline predicts."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.planner.advice import configured_seconds
from tandem.planner.prediction import predict_step, quantiles
from tandem.planner.search import Split, balanced_split, lower_bound_s, suggest
from tandem.planner.task_times import TaskTimes

GROUPS = (("actor-train", "logp"), ("ref_logp",), ("generate",))
KEYS = (
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.rollout.n=1",
    "data.val_files=[]",
)
CONFIG = load_config(RunConfig, KEYS).config
TAIL = (0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 4.5)
"""Relative lengths of responses."""


def times(generate: float, train: float, ref: float, *, sync: float = 0.3) -> TaskTimes:
    """Seconds on 4 devices, all of which divide but for the sync."""
    measured = {
        "generate": ((4, generate),),
        "actor-train": ((4, train),),
        "logp": ((4, train / 4),),
        "ref_logp": ((4, ref),),
        "sync": ((1, sync),),
    }
    return TaskTimes(measured, (1.0,))


def test_no_prediction_is_below_the_floor_and_a_lag_comes_near_it() -> None:
    for case in (times(8, 6, 2), times(3, 16, 2)):
        for devices in ((3, 1, 2), (2, 2, 2)):
            floor = lower_bound_s(case, GROUPS, devices=devices)
            split = Split(devices, 2)
            predicted = predict_step(CONFIG, case, groups=GROUPS, split=split)
            assert 0.99 * floor <= predicted <= 1.05 * floor


def test_without_a_lag_the_tasks_of_a_step_follow_each_other() -> None:
    case = times(8, 6, 2)
    predicted = predict_step(CONFIG, case, groups=GROUPS, split=Split((4, 4, 4), 0))
    assert predicted == pytest.approx(8 + 2 + 6 + 1.5 + 0.3, rel=0.01)


def test_tasks_that_share_all_devices_take_turns() -> None:
    everything = (("actor-train", "logp", "ref_logp", "generate"),)
    case = times(8, 6, 2)
    predicted = predict_step(CONFIG, case, groups=everything, split=Split((4,), 0))
    assert predicted == pytest.approx(8 + 2 + 6 + 1.5 + 0.3, rel=0.01)


def test_a_step_without_a_lag_waits_for_the_longest_response() -> None:
    assert statistics.fmean(TAIL) == 1
    case = replace(times(8, 6, 2), relative_lengths=TAIL)
    alone = predict_step(CONFIG, case, groups=GROUPS, split=Split((4, 4, 4), 0))
    assert alone == pytest.approx(8 * 4.5 + 2 + 6 + 1.5 + 0.3, rel=0.01)
    ahead = predict_step(CONFIG, case, groups=GROUPS, split=Split((4, 4, 4), 2))
    assert 8 + 0.3 < ahead < 0.5 * alone


def test_half_a_batch_ahead_hides_less_than_a_whole_one() -> None:
    case = times(6, 6, 2)
    ahead = ("trainer.async_pipeline=True", "trainer.generate_ahead_steps=0.5")
    apart = ("trainer.separated_node_tasks=[[actor-train,logp],[ref_logp],[generate]]",)
    ratios = ("trainer.separated_node_ratios=[0.334,0.334,0.334]", "trainer.n_gpus_per_node=12")
    config = load_config(RunConfig, [*KEYS, *ahead, *apart, *ratios]).config
    groups = [pool.tasks for pool in place_run(config).used_pools]
    none, half, whole = (
        predict_step(config, case, groups=groups, split=Split((4, 4, 4), lag))
        for lag in (0, 0.5, 1)
    )
    assert whole + 0.5 < half <= none  # responses that begin later take as long
    assert configured_seconds(config, case) == half


def test_weights_that_travel_beside_generation_cost_it_no_time() -> None:
    case, split = times(12, 6, 2, sync=2.0), Split((4, 4, 4), 2)
    key = "actor_rollout_ref.rollout.enable_param_async=True"
    staged = load_config(RunConfig, [*KEYS, key]).config
    for config, expected in ((CONFIG, 12 + 2.0), (staged, 12)):
        predicted = predict_step(config, case, groups=GROUPS, split=split)
        assert predicted == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("seconds", "lag"),
    [
        ((9.0, 5.0, 5.0, 5.0), 1),
        ((9.0, 5.09, 5.05, 5.0), 1),
        ((9.0, 5.11, 5.05, 5.0), 2),
        ((5.0, 5.0, 5.0, 5.0), 0),
        ((9.0, 8.0, 7.0, 5.0), 3),
    ],
)
def test_the_smallest_lag_is_taken_that_is_nearly_as_fast_as_any(
    seconds: tuple[float, ...], lag: int
) -> None:
    found = suggest(
        times(8, 6, 2),
        GROUPS,
        start=Split((3, 2, 3), 0),
        lags=range(4),
        is_allowed=lambda _: True,
        predict=lambda split: seconds[split.lag],
    )
    assert (found.split.lag, found.seconds) == (lag, seconds[lag])


@pytest.mark.parametrize("best", [(2, 5, 2), (1, 7, 1), (6, 1, 2)])
def test_devices_are_moved_from_the_balanced_split_as_long_as_that_helps(
    best: tuple[int, ...],
) -> None:
    """What balances the groups' own times, and where the run began, are both far from the best."""
    case, start = times(8, 6, 2), Split((3, 3, 3), 0)
    balanced = balanced_split(case, GROUPS, num_devices=9, is_allowed=lambda _: True)

    def predict(split: Split) -> float:
        return 1 + sum(abs(a - b) for a, b in zip(split.devices, best, strict=True))

    found = suggest(
        case, GROUPS, start=start, lags=(0, 1), is_allowed=lambda _: True, predict=predict
    )
    assert best not in (balanced, start.devices)
    assert (found.split, found.seconds) == (Split(best, 0), 1)


def test_devices_are_moved_once_more_when_the_lag_is_known() -> None:
    """With the largest lag all divisions are alike, and another one is the best without any."""

    def predict(split: Split) -> float:
        return 5.0 if split.lag else 5.0 + 0.01 * abs(split.devices[0] - 6)

    found = suggest(
        times(8, 6, 2),
        GROUPS,
        start=Split((3, 3, 3), 1),
        lags=(0, 1),
        is_allowed=lambda _: True,
        predict=predict,
    )
    assert (found.split.devices[0], found.split.lag, found.seconds) == (6, 0, 5.0)


def test_splits_that_cannot_run_are_never_looked_at() -> None:
    seen: list[Split] = []

    def predict(split: Split) -> float:
        seen.append(split)
        return lower_bound_s(times(8, 6, 2), GROUPS, devices=split.devices)

    found = suggest(
        times(8, 6, 2),
        GROUPS,
        start=Split((4, 2, 2), 0),
        lags=(0,),
        is_allowed=lambda devices: devices[0] % 2 == 0,
        predict=predict,
    )
    assert all(split.devices[0] % 2 == 0 and sum(split.devices) == 8 for split in seen)
    assert found.split.devices[0] % 2 == 0


def test_hundreds_of_devices_need_few_predictions() -> None:
    case = TaskTimes(
        {"generate": ((64, 40.0),), "actor-train": ((64, 60.0),), "ref_logp": ((64, 9.0),)}, (1.0,)
    )

    def predict(split: Split) -> float:
        return lower_bound_s(case, GROUPS, devices=split.devices)

    found = suggest(
        case,
        GROUPS,
        start=Split((510, 1, 1), 1),
        lags=(1,),
        is_allowed=lambda _: True,
        predict=predict,
    )
    ideal = sum(64 * seconds for seconds in (40.0, 60.0, 9.0)) / 512
    assert found.seconds <= 1.02 * ideal
    assert len(found.predictions) < 100


def test_balanced_devices_are_the_nearest_that_are_allowed() -> None:
    case = times(4, 4, 2, sync=0.001)
    even = balanced_split(case, GROUPS, num_devices=9, is_allowed=lambda _: True)
    assert even in ((4, 2, 3), (3, 2, 4))
    assert balanced_split(case, GROUPS, num_devices=9, is_allowed=lambda _: False) is None
    odd = balanced_split(case, GROUPS, num_devices=9, is_allowed=lambda d: d[0] == 1)
    assert odd is not None and odd[0] == 1 and sum(odd) == 9


def test_few_lengths_stand_for_many() -> None:
    lengths = [1.0] * 90 + [10.0] * 10
    chosen = quantiles([x / 1.9 for x in lengths], 16)
    assert len(chosen) == 16 and sum(chosen) / 16 == pytest.approx(1.0)
    assert max(chosen) == pytest.approx(10 / 1.9)
    assert quantiles([1.0], 16) == [1.0] * 16
