# SPDX-License-Identifier: Apache-2.0
"""The search of the planner on formulas, and what the simulated pipeline predicts."""

from __future__ import annotations

import pytest

from tandem.config.overrides import load_config
from tandem.config.run import RunConfig
from tandem.metrics.task_times import TaskTimes
from tandem.pipeline.planner import Split, balanced_split, floor_seconds, suggest
from tandem.pipeline.prediction import predict_step, strata

GROUPS = (("actor-train", "logp"), ("ref_logp",), ("generate",))
CONFIG = load_config(
    RunConfig, ["actor_rollout_ref.actor.use_kl_loss=True", "data.val_files=[]"]
).config


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
            floor = floor_seconds(case, GROUPS, devices=devices)
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


def test_splits_that_cannot_run_are_never_looked_at() -> None:
    seen: list[Split] = []

    def predict(split: Split) -> float:
        seen.append(split)
        return floor_seconds(times(8, 6, 2), GROUPS, devices=split.devices)

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
        return floor_seconds(case, GROUPS, devices=split.devices)

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
    chosen = strata([x / 1.9 for x in lengths], 16)
    assert len(chosen) == 16 and sum(chosen) / 16 == pytest.approx(1.0)
    assert max(chosen) == pytest.approx(10 / 1.9)
    assert strata([1.0], 16) == [1.0] * 16
