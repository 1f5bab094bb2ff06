# SPDX-License-Identifier: Apache-2.0
"""Mistakes in the options of ``tandem certify`` are told before the suite runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.cli import certify
from tandem.cli.main import EXIT_USER_ERROR, main
from tandem.errors import UserError


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_number_of_processes_that_cannot_be(number: str, tmp_path: Path) -> None:
    arguments = ["--platform", "cpu", "--output", str(tmp_path / "new")]
    with pytest.raises(UserError, match=f"--ranks={number}: must be at least 1"):
        certify.run([*arguments, "--ranks", number])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_that_cannot_be(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["certify", "--platform", "cpu", "--output", str(tmp_path / "new")]
    assert main([*arguments, "--timeout", seconds]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: --timeout={float(seconds)}: must be a positive number of seconds."
    )
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(UserError, match=f"--output='{file}': cannot be written to"):
        certify.run(["--platform", "cpu", "--output", str(file)])


def test_a_platform_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="--platform='asend': there is no such platform"):
        certify.run(["--platform", "asend"])
