# SPDX-License-Identifier: Apache-2.0
"""Calls on a thread of their own: in order, whatever they raise, and nothing of them is kept."""

from __future__ import annotations

import threading
import weakref

import pytest

from tandem.comm.thread import CallingThread

PATIENCE_S = 10


class Bucket:
    """An object that a call refers to."""


def test_calls_are_made_in_order_and_tell_what_they_raise() -> None:
    thread, made = CallingThread("calls"), list[int]()
    calls = [thread.submit(lambda n=n: made.append(n)) for n in range(5)]
    failing = thread.submit(lambda: {}["nothing"])
    after = thread.submit(lambda: tuple(made))
    with pytest.raises(KeyError, match="nothing"):
        failing.result(PATIENCE_S)
    assert after.result(PATIENCE_S) == (0, 1, 2, 3, 4)
    assert all(call.done() for call in calls)
    thread.finish()


def test_what_has_not_begun_can_be_dropped() -> None:
    thread, begun, ending = CallingThread("calls"), threading.Event(), threading.Event()
    stuck = thread.submit(lambda: begun.set() or ending.wait(PATIENCE_S))
    assert begun.wait(PATIENCE_S)
    dropped = thread.submit(lambda: 1)
    thread.drop()
    last = thread.submit(lambda: 2)
    ending.set()
    assert stuck.result(PATIENCE_S)
    assert last.result(PATIENCE_S) == 2
    assert not dropped.done()
    thread.finish()


def test_nothing_of_a_call_is_kept_until_the_next_one() -> None:
    thread, gone, bucket = CallingThread("calls"), threading.Event(), Bucket()
    weakref.finalize(bucket, gone.set)
    call = thread.submit(lambda held=bucket: held is None)
    del bucket
    assert not call.result(PATIENCE_S)
    assert gone.wait(PATIENCE_S)
    thread.finish()
