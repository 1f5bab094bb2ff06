# SPDX-License-Identifier: Apache-2.0
"""What is done beside a thread ends, and is told of once."""

from __future__ import annotations

import threading

import pytest

from tandem.weight_sync.background import Background


def test_it_runs_beside_its_owner_and_is_waited_for() -> None:
    background, may_end, done = Background("test"), threading.Event(), list[str]()
    background.join()
    background.check()

    def job() -> None:
        may_end.wait(5)
        done.append("job")

    background.start(job, then=lambda: done.append("then"))
    assert background.is_busy
    assert not done
    with pytest.raises(AssertionError, match="one thing at a time"):
        background.start(job, then=job)
    may_end.set()
    background.join()
    assert not background.is_busy
    assert done == ["job", "then"]


def test_an_error_is_known_before_then_and_raised_once() -> None:
    background = Background("test")
    seen: list[str] = []

    def fail() -> None:
        raise KeyError("gone")

    def then() -> None:
        try:
            background.check()
        except KeyError as error:
            seen.append(str(error))

    background.start(fail, then=then)
    background.join()
    assert seen == ["'gone'"]
    background.check()
    background.start(fail, then=lambda: None)
    background.join()
    with pytest.raises(KeyError, match="gone"):
        background.check()
    background.check()
