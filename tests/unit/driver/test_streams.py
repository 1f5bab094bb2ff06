# SPDX-License-Identifier: Apache-2.0
"""Standard streams that the caller has closed."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from tandem.driver.streams import open_closed_streams


@pytest.mark.parametrize("is_taken", [False, True])
def test_closed_streams_are_opened_on_nothing(
    is_taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, file = os.dup(1), tmp_path / "of_the_user"
    file.write_text("mine")
    try:
        os.close(1)
        if is_taken:  # by a file that the program has opened since
            assert os.open(file, os.O_RDWR) == 1
        monkeypatch.setattr(sys, "stdout", None)
        open_closed_streams()
        assert isinstance(sys.stdout, io.TextIOBase)
        assert (sys.stdout.fileno() == 1) is not is_taken
        sys.stdout.write("nowhere\n")
        sys.stdout.flush()
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert file.read_text() == "mine"
