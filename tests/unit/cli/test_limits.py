# SPDX-License-Identifier: Apache-2.0
"""A full disk, a full output and files of another kind are one line with their path."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.cli import export
from tandem.cli import main as cli
from tandem.driver.run_folder import require_writable
from tandem.errors import UserError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EFBIG])
def test_limits_of_the_machine_are_one_line(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise OSError(number, os.strerror(number), "/some/file")

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == f"error: /some/file: {os.strerror(number)}\n"


def test_too_few_descriptors_are_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: Too many open files (ulimit -n sets how many)\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise FileNotFoundError(errno.ENOENT, "no such file", "/some/file")

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(FileNotFoundError):
        cli.main(["doctor"])


def test_a_full_output_is_named_and_a_closed_one_is_ignored() -> None:
    """``/dev/full`` refuses each write like a full disk; ``>&-`` closes the output."""
    assert run_redirected(">/dev/full") == (1, "error: standard output: No space left on device\n")
    assert run_redirected(">&-") == (0, "")


def run_redirected(redirection: str) -> tuple[int, str]:
    """Return the exit code of ``tandem --version`` and what it wrote to stderr."""
    words = ["sh", "-c", f'"$0" -m tandem --version {redirection}', sys.executable]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(words, env=buffered, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


def write_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n')
    return folder


DEEP = json.dumps({"step": 1}) + "\n" + '{"step":2,"a":' + "[" * 100_000 + "]" * 100_000 + "}\n"


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("metrics.jsonl", None, "is not a file"),
        ("rollouts.jsonl", None, "is not a file"),
        ("rollouts.jsonl", '{"step": null}\n', "line 1 is no record of a rollout"),
        ("settings.jsonl", '{"a": 1}\n', "line 1 is no record of changed settings"),
        ("settings.jsonl", '{"step": 1, "changed": {"a": 1}}\n', "line 1 is no record"),
        ("settings.jsonl", "[]\n{}\n", "line 1 is not a JSON object"),
        ("restarts.jsonl", '{"restart": 1, "step": 2}\n', "line 1 is no record of a restart"),
        ("metrics.jsonl", DEEP + "{}\n", "line 2 is not a JSON object"),
        ("config.json", "[" * 100_000, "is not valid JSON"),
    ],
)
def test_damaged_files_of_a_run_are_named(
    name: str,
    content: str | None,
    rule: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_run(tmp_path / "run ") / name
    if content is None:
        path.unlink(missing_ok=True)
        path.mkdir()
    else:
        path.write_text(content)
    assert cli.main(["report", str(path.parent)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(path) in message and rule in message


def test_a_config_of_other_types_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text('{"trainer": 3, "actor_rollout_ref": "x", "data": []}')
    assert cli.main(["report", str(run)]) == 0


@pytest.mark.parametrize("command", [["report"], ["doctor"], ["export", "--output", "new"]])
def test_a_name_that_ends_in_a_space_is_explained(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``trainer.default_local_dir='run '`` writes into ``run``, by the grammar of overrides."""
    run = write_run(tmp_path / "run")
    name, *options = command
    assert cli.main([name, f"{run} ", *options]) == 2
    message = capsys.readouterr().err
    assert f"RUN='{run} ': no such folder. Give '{run}': spaces at the ends" in message


def test_a_file_in_the_place_of_a_killed_save_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".partial_step_9").write_text("")
    CheckpointStore(tmp_path).repair()
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory"):
        require_writable(tmp_path / "file" / "run")


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("errors", [OSError, KeyboardInterrupt])
def test_an_export_that_fails_leaves_nothing(
    errors: type[BaseException], is_new: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "run/global_step_1"
    with CheckpointStore(tmp_path / "run").writing(1, {}) as partial:
        (partial / "actor").mkdir()
    output = tmp_path / "output"
    if not is_new:
        output.mkdir()

    def fill_the_disk(folder: Path, output: Path, **_: object) -> None:
        assert folder == checkpoint / "actor"
        output.mkdir(exist_ok=True)
        (output / "config.json").write_text("{}")
        raise errors(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output / "model.safetensors"))

    monkeypatch.setattr(export, "write_model", fill_the_disk)
    wanted = UserError if errors is OSError else KeyboardInterrupt
    with pytest.raises(wanted) as caught:
        export.run([str(tmp_path / "run"), "--output", str(output)])
    if wanted is UserError:
        assert f"--output='{output}': cannot be written (No space left" in str(caught.value)
    assert output.exists() is not is_new
    assert is_new or not list(output.iterdir())
