# SPDX-License-Identifier: Apache-2.0
"""The numbers of ``tandem compare``, against ones worked out by hand (A16)."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.report.compare import Comparison, Deviation, Pair, choose_metric, compare_runs
from tandem.report.compare_sources import MetricLog
from tests.unit.report.compare_runs import (
    LOSS,
    REWARD,
    REWARDS_A,
    SECONDS,
    THROUGHPUT,
    A,
    B,
    Columns,
)


def _log(columns: Columns, *, first_step: int = 1, name: str = "run") -> MetricLog:
    numbered = {
        metric: dict(enumerate(values, start=first_step)) for metric, values in columns.items()
    }
    return MetricLog(Path(name), numbered)


def _compare(a: Columns, b: Columns, *, limit_percent: float = 4.0) -> Comparison:
    pair = Pair(_log(a), _log(b))
    return compare_runs(pair, metric=choose_metric(pair, None), limit_percent=limit_percent)


def test_a16_the_published_numbers() -> None:
    compared = _compare(A, B)
    assert compared.metric == REWARD
    assert 100 * compared.deviation.mean_absolute == pytest.approx((2 + 1 + 0 + 4 + 2 + 3) / 6)
    first, time = compared.first_throughput, compared.total_time
    assert first is not None
    assert (first.a, first.b, first.value) == (250, 125, 0.5)
    assert time is not None
    assert (time.a, time.b, time.value) == (20, 40, 0.5)


def test_a16_the_numbers_beside_them() -> None:
    compared = _compare(A, B)
    deviation = compared.deviation
    assert 100 * deviation.bias == pytest.approx((2 - 1 + 0 + 4 - 2 + 3) / 6)
    assert 100 * deviation.largest == pytest.approx(4)
    assert deviation.largest_step == 4
    assert deviation.relative == pytest.approx(0.12 / sum(REWARDS_A))
    assert compared.steady_throughput is not None
    assert compared.steady_throughput.value == pytest.approx(400 / 500)


def test_a16_the_error_is_not_divided_by_the_reference() -> None:
    compared = _compare({LOSS: [0.30, 30.0]}, {LOSS: [0.33, 30.03]}, limit_percent=2)
    assert 100 * compared.deviation.mean_absolute == pytest.approx(3)
    assert not compared.is_within_limit


@pytest.mark.parametrize("limit_percent", [2.0, 4.0])
def test_a16_the_limit_is_inclusive(limit_percent: float) -> None:
    within, beyond = limit_percent / 100, limit_percent / 100 + 1e-9
    assert _compare({LOSS: [0.0]}, {LOSS: [within]}, limit_percent=limit_percent).is_within_limit
    assert not _compare(
        {LOSS: [0.0]}, {LOSS: [-beyond]}, limit_percent=limit_percent
    ).is_within_limit


def test_a16_the_noise_floor_is_what_repetitions_differ_by() -> None:
    shifted = {REWARD: [value + 0.005 for value in REWARDS_A]}
    farther = {REWARD: [value + 0.01 for value in B[REWARD]]}
    pair = Pair(_log(A), _log(B), repeat_a=_log(shifted), repeat_b=_log(farther))
    compared = compare_runs(pair, metric=REWARD, limit_percent=4)
    floors = {side: 100 * noise.mean_absolute for side, noise in compared.noise.items()}
    assert floors == pytest.approx({"A": 0.5, "B": 1.0})
    assert compared.noise_floor == pytest.approx(0.01)
    assert compared.deviation == _compare(A, B).deviation
    assert _compare(A, B).noise_floor is None


def test_only_common_steps_count() -> None:
    pair = Pair(_log({REWARD: [9.0, 0.5, 0.5]}), _log({REWARD: [0.5, 0.6, 9.0]}, first_step=2))
    deviation = compare_runs(pair, metric=REWARD, limit_percent=4).deviation
    assert deviation.steps == (2, 3)
    assert deviation.num_single == 2
    assert deviation.mean_absolute == pytest.approx(0.05)


def test_what_is_not_finite_is_counted_and_no_agreement() -> None:
    compared = _compare({LOSS: [1.0, math.nan, 2.0]}, {LOSS: [1.0, 1.0, math.inf]})
    assert compared.deviation.num_broken == 2
    assert compared.deviation.mean_absolute == 0
    assert not compared.is_within_limit
    empty = _compare({LOSS: [math.nan]}, {LOSS: [math.nan]})
    assert empty.deviation.num_broken == 1
    assert not empty.is_within_limit


def test_runs_without_times_or_many_steps_are_compared_too() -> None:
    compared = _compare({REWARD: [0.5]}, {REWARD: [0.5]})
    assert compared.is_within_limit
    assert compared.first_throughput is None
    assert compared.steady_throughput is None
    assert compared.total_time is None
    short = {REWARD: [0.5] * 2, THROUGHPUT: [10.0, 30.0], SECONDS: [0.0, 0.0]}
    compared = _compare(short, short)
    assert compared.first_throughput is not None
    assert compared.first_throughput.a == 20
    assert compared.steady_throughput is None
    assert compared.total_time is None


def test_a_reference_of_zeros_has_no_relative_error() -> None:
    assert _compare({REWARD: [0.0]}, {REWARD: [0.1]}).deviation.relative == math.inf
    assert _compare({REWARD: [0.0]}, {REWARD: [0.0]}).deviation.relative == 0


def test_rewards_are_compared_before_losses_and_whatever_is_asked_for() -> None:
    both = _log({LOSS: [1.0], REWARD: [1.0], "actor/entropy": [1.0]})
    assert choose_metric(Pair(both, both), None) == REWARD
    assert choose_metric(Pair(both, _log({LOSS: [1.0]})), None) == LOSS
    assert choose_metric(Pair(both, both), "actor/entropy") == "actor/entropy"


def test_a_missing_metric_is_an_error_that_names_close_ones() -> None:
    rewards, losses = _log({REWARD: [1.0]}, name="a"), _log({LOSS: [1.0]}, name="b")
    with pytest.raises(UserError, match=r"^A='a', B='b': do not both log one of critic/rewards"):
        choose_metric(Pair(rewards, losses), None)
    with pytest.raises(UserError, match=r"^B='b': does not log train/los \(it logs train/loss\)\."):
        choose_metric(Pair(_log({"train/los": [1.0]}), losses), "train/los")
    with pytest.raises(UserError, match=r"^--repeat-b='b': does not log critic/rewards/mean"):
        choose_metric(Pair(rewards, rewards, repeat_b=losses), None)


def test_runs_without_a_common_step_are_an_error() -> None:
    pair = Pair(_log({REWARD: [1.0, 1.0]}), _log({REWARD: [1.0]}, first_step=7))
    with pytest.raises(UserError, match=r"of A and B: have no common step \(steps 1 to 2 and step"):
        compare_runs(pair, metric=REWARD, limit_percent=4)
    with pytest.raises(UserError, match="of A and its repetition: have no common step"):
        compare_runs(Pair(pair.a, pair.a, repeat_a=pair.b), metric=REWARD, limit_percent=4)


def test_the_same_runs_do_not_deviate() -> None:
    deviation = _compare(A, A).deviation
    assert deviation == Deviation((1, 2, 3, 4, 5, 6), 0.0, 0.0, 1, 0.0, 0.0, 0, 0)
