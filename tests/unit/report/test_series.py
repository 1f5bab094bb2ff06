# SPDX-License-Identifier: Apache-2.0
"""Curves: thinning, and the choice of charts."""

from tandem.report.series import MAX_POINTS, charts, curves, thin


def _titles(columns):
    return [chart.title for chart in charts(columns)]


def test_short_curves_are_kept_as_they_are():
    assert thin([(1, 0.5), (2, 1 / 3)]) == {"x": [1, 2], "y": [0.5, 0.33333]}


def test_long_curves_are_thinned_but_a_spike_stays():
    column = [(step, 100.0 if step == 5000 else 1.0) for step in range(1, 10_001)]

    curve = thin(column)

    assert len(curve["x"]) == MAX_POINTS
    assert curve["x"][-1] == 10_000
    assert max(curve["hi"]) == 100.0
    assert max(curve["y"]) == 4.96  # the mean over 25 steps
    assert min(curve["lo"]) == 1.0


def test_only_charts_with_data_are_drawn():
    columns = {
        "critic/score/mean": [(1, 0.5)],
        "val-core/gsm8k/reward/mean@1": [(0, 0.1)],
        "actor/entropy": [],
    }

    assert _titles(columns) == ["Training reward", "Validation"]


def test_rewards_equal_to_scores_are_not_drawn_twice():
    same = {"critic/score/mean": [(1, 0.5)], "critic/rewards/mean": [(1, 0.5)]}
    shaped = {"critic/score/mean": [(1, 0.5)], "critic/rewards/mean": [(1, 0.4)]}

    assert list(charts(same)[0].metrics) == ["critic/score/mean"]
    assert list(charts(shaped)[0].metrics) == ["critic/score/mean", "critic/rewards/mean"]


def test_failures_are_drawn_only_if_there_are_any():
    assert _titles({"reward/timeouts": [(1, 0.0)], "reward/errors": [(1, 0.0)]}) == []
    assert _titles({"reward/timeouts": [(1, 0.0), (2, 3.0)]}) == ["Failed rewards"]


def test_time_of_a_step_adds_up():
    columns = {
        "timing_s/step": [(1, 10.0), (2, 9.0)],
        "timing_s/gen": [(1, 4.0), (2, 5.0)],
        "timing_s/update_actor": [(1, 5.0), (2, 5.0)],
        "timing_s/testing": [(2, 30.0)],
    }

    (chart,) = charts(columns)

    assert chart.stacked
    assert chart.metrics == {
        "timing_s/update_actor": "update_actor",
        "timing_s/gen": "gen",
        "timing_s/(other)": "other",
    }
    assert curves(columns)["timing_s/(other)"] == {"x": [1, 2], "y": [1.0, 0.0]}
