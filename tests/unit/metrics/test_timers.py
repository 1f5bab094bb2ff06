# SPDX-License-Identifier: Apache-2.0
"""Sections add up under a virtual clock."""

import pytest

from tandem.metrics.timers import Timers


class _Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_sections_repeat_and_nest():
    clock = _Clock()
    timers = Timers(clock)
    with timers.section("step"):
        for seconds in (1.0, 2.0):
            with timers.section("gen"):
                clock.now += seconds
        clock.now += 0.5

    assert timers.take() == {"gen": 3.0, "step": 3.5}
    assert timers.take() == {}


def test_seconds_measured_elsewhere_add_up():
    clock = _Clock()
    timers = Timers(clock)
    with timers.section("gen"):
        clock.now += 1.0
    timers.add("gen", 0.5)
    timers.add("reward", 2.0)

    assert timers.take() == {"gen": 1.5, "reward": 2.0}


def test_a_section_that_raises_counts():
    clock = _Clock()
    timers = Timers(clock)
    with pytest.raises(RuntimeError), timers.section("reward"):
        clock.now += 4.0
        raise RuntimeError("reward failed")

    assert timers.take() == {"reward": 4.0}
