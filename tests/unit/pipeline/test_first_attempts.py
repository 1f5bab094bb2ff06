# SPDX-License-Identifier: Apache-2.0
"""The first steps of environments and agents: a run where none works ends, and no other does."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tandem.errors import RunFailure
from tandem.pipeline.first_attempts import FirstAttempts

FAILED = "KeyError: 'x' (t.py:3)"
ENDS = r"first {} steps of environments and agents have failed; the last: KeyError: 'x' \(t.py:3\)"


def fail(attempts: FirstAttempts, times: int = 1) -> int:
    """Let attempts fail one after another; return how many did while the run goes on."""
    for _ in range(times):
        with attempts.begin() as conclude:
            conclude(FAILED)
    return times


def test_m14_a_run_whose_first_steps_all_fail_ends_with_the_cause() -> None:
    attempts = FirstAttempts()
    fail(attempts, 7)
    with pytest.raises(RunFailure, match=ENDS.format(8)):
        fail(attempts)


def test_an_attempt_that_has_worked_lets_all_later_ones_fail() -> None:
    attempts = FirstAttempts()
    fail(attempts, 7)
    with attempts.begin() as conclude:
        conclude("")
    assert fail(attempts, 20) == 20


def test_a_run_goes_on_while_one_that_was_under_way_may_work() -> None:
    attempts = FirstAttempts()
    with attempts.begin() as slow:
        fail(attempts, 20)
        slow("")
    assert fail(attempts, 20) == 20


def test_a_run_ends_when_those_that_were_under_way_have_failed_too() -> None:
    attempts = FirstAttempts()
    with attempts.begin() as slow, attempts.begin() as slower:
        fail(attempts, 8)
        with attempts.begin():  # it has begun later, and is not waited for
            slow(FAILED)
            with pytest.raises(RunFailure, match=ENDS.format(10)):
                slower(FAILED)


def test_an_attempt_that_is_given_up_is_not_waited_for() -> None:
    attempts = FirstAttempts()
    with pytest.raises(RunFailure, match=ENDS.format(9)), attempts.begin():
        assert fail(attempts, 9) == 9


def test_what_ends_an_attempt_is_not_hidden_by_the_end_of_the_run() -> None:
    attempts = FirstAttempts()
    with pytest.raises(KeyError), attempts.begin():
        fail(attempts, 9)
        raise KeyError


def test_attempts_that_wait_for_a_place_are_not_waited_for() -> None:
    attempts = FirstAttempts()
    with ExitStack() as stack:
        ends = [stack.enter_context(attempts.begin("mine", num_places=2)) for _ in range(640)]
        for end in ends[:9]:
            end(FAILED)
        with pytest.raises(RunFailure, match=ENDS.format(10)):
            ends[9](FAILED)
