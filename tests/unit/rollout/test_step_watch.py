# SPDX-License-Identifier: Apache-2.0
"""The watch of steps: how long a step may take, and that one that hangs is told."""

from __future__ import annotations

import threading

import pytest

from tandem.rollout.step_watch import StepWatch
from tests.fakes.patience import PATIENCE_S, until


def test_the_limit_is_twenty_times_the_longest_step_and_at_least_the_least() -> None:
    watch = StepWatch("an engine", least_s=60.0, first_s=900.0)
    assert watch.limit_s == 900.0
    with watch.watching():
        pass
    assert watch.limit_s == 60.0
    watch._durations_s.append(4.0)
    assert watch.limit_s == 80.0
    watch._durations_s.extend([0.1] * 100)
    assert watch.limit_s == 60.0, "a slow step is forgotten"
    watch.close()


def test_a_step_that_does_not_return_is_told_and_others_are_not() -> None:
    told: list[str] = []
    has_told = threading.Event()

    def end(cause: str) -> None:
        told.append(cause)
        has_told.set()

    # The interpreter must not end the tests' own process: it waits for minutes more.
    watch = StepWatch("vLLM", least_s=0.2, first_s=0.2, look_s=0.01, held_s=2 * PATIENCE_S, end=end)
    for _ in range(3):
        with watch.watching():
            pass
    watch._durations_s.clear()  # a busy machine makes them long, and the limit with them
    assert not has_told.wait(0.1)
    with watch.watching():
        assert has_told.wait(PATIENCE_S)
    assert told == ["vLLM: a step has not returned for 0 s"]


def test_a_step_is_named_once_before_it_is_ended_and_the_first_is_not() -> None:
    named: list[str] = []
    has_ended = threading.Event()
    watch = StepWatch(
        "vLLM",
        least_s=2.0,
        first_s=2.0,
        look_s=0.01,
        held_s=2 * PATIENCE_S,
        slow_s=0.1,
        end=lambda _: has_ended.set(),
        warn=named.append,
    )
    assert watch.slow_s == 2.0, "the first step may compile"
    with watch.watching():
        pass
    watch._durations_s.clear()
    watch._durations_s.append(0.0)
    with watch.watching():
        assert has_ended.wait(PATIENCE_S)
    (line,) = named
    assert line.startswith("vLLM: a step has not returned for 0 s. After 2 s, this process (pid ")
    watch._durations_s.append(3.0)
    assert watch.slow_s == 6.0


def test_a_step_that_raises_is_not_watched_any_more() -> None:
    told: list[str] = []
    watch = StepWatch("vLLM", first_s=1.0, look_s=0.01, held_s=2 * PATIENCE_S, end=told.append)
    with pytest.raises(ValueError), watch.watching():
        raise ValueError
    assert not threading.Event().wait(1.5)
    assert not told
    watch.close()


def test_a_step_is_not_ended_for_the_time_in_which_the_process_was_suspended() -> None:
    now_s = [0.0]
    ended: list[str] = []
    has_ended, named = threading.Event(), threading.Event()

    def end(cause: str) -> None:
        ended.append(cause)
        has_ended.set()

    watch = StepWatch(
        "vLLM",
        look_s=0.01,
        held_s=2 * PATIENCE_S,
        end=end,
        warn=lambda _: named.set(),
    )
    watch._clock = lambda: now_s[0]
    with watch.watching():
        pass
    with watch.watching():
        for _ in range(5):  # the watch may take one look for two leaps, and never none
            away_s = watch._away_s
            now_s[0] += 600.0
            until(lambda before=away_s: watch._away_s >= before + 590.0)
        assert not named.is_set()
        while not has_ended.is_set():  # time in which it looks every second does count
            now_s[0] += 1.0
            has_ended.wait(0.03)
    assert named.is_set()
    assert ended == ["vLLM: a step has not returned for 60 s"]
    watch.close()
