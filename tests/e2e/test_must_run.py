# SPDX-License-Identifier: Apache-2.0
"""``--must-run``: no test goes away because a tool or a right is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.commands import TIMEOUT_S

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_compiled(flagcx_stub):
    assert flagcx_stub

def test_of_another_machine():
    pytest.skip("needs a GPU: there is none")

@pytest.mark.xfail
def test_expected_to_fail():
    assert False
"""
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_package', reason='it is missing')\n"


@pytest.mark.parametrize(
    ("options", "code", "told", "counts"),
    [
        ((), 0, "", "3 skipped, 1 xfailed"),
        (("--must-run",), 1, "skipped, and must run here: ", "1 skipped, 1 xfailed, 2 errors"),
    ],
)
def test_a_skip_fails_where_it_must_not_be(
    options: tuple[str, ...], code: int, told: str, counts: str, tmp_path: Path
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_whole.py").write_text(WHOLE_FILE)
    words = ["-q", "-rs", "-p", "tests.conftest", "--continue-on-collection-errors", *options]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"CXX": "no-such-compiler", "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{told}vendor doubles: there is no C++ compiler (no-such-compiler;" in done.stdout
    assert f"{told}it is missing" in done.stdout
    assert counts in done.stdout
