# SPDX-License-Identifier: Apache-2.0
"""The phase that is shown, of those that are open."""

import pytest

from tandem.metrics.activity import Activity, Phase


def test_nothing_is_shown_before_the_first_phase_and_after_the_last() -> None:
    activity = Activity()
    assert activity.describe() == ""
    with activity.during(Phase.SAVING):
        assert activity.describe() == "saving"
    assert activity.describe() == ""


def test_the_trainers_phase_is_shown_before_what_happens_beside_it() -> None:
    activity = Activity()
    with (
        activity.during(Phase.VALIDATING, total=256, done=lambda: 40),
        activity.during(Phase.REFERENCE),
    ):
        assert activity.describe() == "reference"
        with activity.during(Phase.UPDATE, total=2, done=lambda: 1):
            assert activity.describe() == "update 1/2"
        assert activity.describe() == "reference"


def test_a_phase_whose_parts_are_all_done_gives_way() -> None:
    activity, generated = Activity(), [212]
    with (
        activity.during(Phase.REWARDS, total=640, done=lambda: 30),
        activity.during(Phase.GENERATING, total=640, done=lambda: generated[0]),
    ):
        assert activity.describe() == "generating 212/640"
        generated[0] = 640
        assert activity.describe() == "rewards 30/640"


def test_two_validations_at_the_same_time_are_shown_one_after_the_other() -> None:
    activity, first = Activity(), [1]
    with (
        activity.during(Phase.VALIDATING, total=4, done=lambda: first[0]),
        activity.during(Phase.VALIDATING, total=4, done=lambda: 0),
    ):
        assert activity.describe() == "validating 1/4"
        first[0] = 4
        assert activity.describe() == "validating 0/4"


def test_a_phase_that_fails_is_closed() -> None:
    activity = Activity()
    with pytest.raises(OSError), activity.during(Phase.SAVING):
        raise OSError
    assert activity.describe() == ""
