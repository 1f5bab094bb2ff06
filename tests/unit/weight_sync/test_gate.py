# SPDX-License-Identifier: Apache-2.0
"""Readers share weights, writers exclude them, and nobody waits without end."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest

from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.gate import WeightGate


def test_readers_share_and_see_the_version() -> None:
    gate = WeightGate(3)
    with gate.reading(0.1) as first, gate.reading(0.1) as second:
        assert (first, second, gate.version) == (3, 3, 3)


def test_weights_without_a_version_cannot_be_read() -> None:
    gate = WeightGate()
    with pytest.raises(SyncError, match="no version has arrived yet"), gate.reading(0.1):
        pass
    with gate.writing(0.1):
        gate.publish(1)
    with gate.reading(0.1) as version:
        assert version == 1
    gate.forbid("version 2 did not arrive whole")
    assert gate.version is None
    with pytest.raises(SyncError, match="version 2 did not arrive whole"), gate.reading(0.1):
        pass


def test_a_writer_waits_for_readers_but_not_for_ever() -> None:
    gate = WeightGate(0)
    with ExitStack() as reader:
        reader.enter_context(gate.reading(0.1))
        with pytest.raises(SyncError, match="in use for longer"), gate.writing(0.02):
            pass
        with gate.reading(0.1):
            pass  # a writer that gave up leaves the gate open
    with gate.writing(0.1), pytest.raises(SyncError, match="being replaced"), gate.writing(0.02):
        pass


def test_a_waiting_writer_goes_before_later_readers() -> None:
    gate = WeightGate(0)
    order: list[str] = []
    waits = threading.Event()

    def write() -> None:
        waits.set()
        with gate.writing(5):
            order.append("written")
            gate.publish(1)

    writer = threading.Thread(target=write)
    with gate.reading(1):
        writer.start()
        waits.wait()
        with pytest.raises(SyncError, match="being replaced"):
            while True:  # until the writer has closed the gate
                with gate.reading(0.01):
                    pass
        order.append("read")
    with gate.reading(5) as version:
        order.append(f"read {version}")
    writer.join()
    assert order == ["read", "written", "read 1"]
