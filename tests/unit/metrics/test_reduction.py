# SPDX-License-Identifier: Apache-2.0
"""Reductions are stated, not guessed from names."""

import math

import pytest

from tandem.metrics.reduction import Reduction, reduce_metrics, reduce_values, update_metrics
from tandem.types import UpdateReport


def _report(loss, *, grad_norm=1.0, learning_rate=1e-3, skipped=False):
    return UpdateReport(
        metrics={"pg_loss": loss},
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        skipped=skipped,
    )


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        (Reduction.MEAN, 2.0),
        (Reduction.MAX, 4.0),
        (Reduction.MIN, 0.5),
        (Reduction.SUM, 6.0),
        (Reduction.LAST, 0.5),
    ],
)
def test_reduce_values(reduction, expected):
    assert reduce_values([1.5, 4.0, 0.5], reduction) == expected


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.MAX, Reduction.MIN])
def test_nan_is_not_swallowed(reduction):
    assert math.isnan(reduce_values([1.0, math.nan, 2.0], reduction))


def test_nothing_to_reduce_is_an_error():
    with pytest.raises(ValueError, match="nothing to reduce"):
        reduce_values([], Reduction.MEAN)


def test_a_name_with_max_in_it_is_averaged_unless_stated():
    parts = [{"max_ratio": 1.0, "peak": 1.0}, {"max_ratio": 3.0, "peak": 3.0, "once": 7.0}]

    merged = reduce_metrics(parts, {"peak": Reduction.MAX})

    assert merged == {"max_ratio": 2.0, "peak": 3.0, "once": 7.0}


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
