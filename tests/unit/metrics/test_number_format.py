# SPDX-License-Identifier: Apache-2.0
"""Numbers for people."""

import math

import pytest

from tandem.metrics.number_format import format_duration, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.51234, "0.512"),
        (25.0, "25"),
        (999.6, "1000"),
        (1234.5, "1234"),
        (12345.0, "12.3k"),
        (128340.0, "128k"),
        (2.5e6, "2.5M"),
        (3e-7, "3e-07"),
        (-0.0155, "-0.0155"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_format_number(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.14, "3.1 s"), (76.2, "1 min 16 s"), (119.7, "2 min 0 s"), (7325, "2 h 2 min")],
)
def test_format_duration(seconds, text):
    assert format_duration(seconds) == text
