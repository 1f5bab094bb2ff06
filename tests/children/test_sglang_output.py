# SPDX-License-Identifier: Apache-2.0
"""The output of SGLang's process goes to a log, which errors name. SGLang is absent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tandem.api import EngineDied
from tandem.rollout.sglang import client


def test_a_process_that_ends_leaves_a_log_that_its_error_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(client, "PROGRAM", "json")  # a module without a main function
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    read_fd, write_fd = os.pipe()
    with pytest.raises(EngineDied, match=r"^SGLang: process ended with exit code 1; its") as caught:
        client.SglangProcess(sys.executable, first={}, memory_fd=read_fd, on_cpu=True)
    os.close(read_fd)
    os.close(write_fd)
    (log,) = tmp_path.iterdir()
    assert str(caught.value).endswith(f"; its output is in {log}")
    assert "has no attribute 'main'" in log.read_text()
    assert capfd.readouterr() == ("", "")
