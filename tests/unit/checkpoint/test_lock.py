# SPDX-License-Identifier: Apache-2.0
"""A run folder belongs to one process at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoint.lock import LOCK_NAME, exclusive
from tandem.errors import UserError

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time
from pathlib import Path
from tandem.checkpoint.lock import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_folder_is_free_again_afterwards_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), exclusive(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
        raise ValueError("inside")
    assert not list(tmp_path.iterdir())
    with exclusive(tmp_path):
        pass


def test_another_process_is_refused_until_the_owner_is_gone_however_it_ended(
    tmp_path: Path,
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None and owner.stdout.readline() == "held\n"
    message = rf"another run is using the folder \(process {owner.pid}\)\. Wait"
    with pytest.raises(UserError, match=message), exclusive(tmp_path):
        pass
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=10)
    assert (tmp_path / LOCK_NAME).read_text() == f"{owner.pid}\n", "what a killed run leaves"
    with exclusive(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"), exclusive(tmp_path / "nowhere"):
        pass
