# SPDX-License-Identifier: Apache-2.0
"""Metrics of several updates are averaged, whatever their names."""

import math

from tandem.metrics.reduction import update_metrics
from tandem.types import UpdateReport


def _report(loss, *, grad_norm=1.0, learning_rate=1e-3, skipped=False):
    return UpdateReport(
        metrics={"pg_loss": loss},
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        skipped=skipped,
    )


def test_a_name_with_max_in_it_is_averaged():
    reports = [
        UpdateReport({"max_ratio": 1.0}, 1.0, 1e-3, skipped=False),
        UpdateReport({"max_ratio": 3.0, "once": 7.0}, 1.0, 1e-3, skipped=False),
    ]

    merged = update_metrics(reports)

    assert (merged["actor/max_ratio"], merged["actor/once"]) == (2.0, 7.0)


def test_nan_is_not_swallowed():
    assert math.isnan(update_metrics([_report(1.0), _report(math.nan)])["actor/pg_loss"])
    infinities = [_report(math.inf), _report(-math.inf), _report(math.nan)]
    assert math.isnan(update_metrics(infinities)["actor/pg_loss"])
    assert math.isnan(update_metrics(infinities[:2])["actor/pg_loss"])


def test_update_metrics_average_the_steps_taken():
    reports = [
        _report(1.0, grad_norm=2.0),
        _report(math.nan, grad_norm=math.inf, skipped=True),
        _report(3.0, grad_norm=4.0, learning_rate=5e-4),
    ]

    assert update_metrics(reports) == {
        "actor/pg_loss": 2.0,
        "actor/grad_norm": 3.0,
        "actor/lr": 5e-4,
        "actor/skipped_updates": 1.0,
    }


def test_update_metrics_of_no_update():
    assert update_metrics([]) == {}
    assert update_metrics([_report(1.0, skipped=True)]) == {
        "actor/lr": 1e-3,
        "actor/skipped_updates": 1.0,
    }
