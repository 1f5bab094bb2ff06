# SPDX-License-Identifier: Apache-2.0
"""What a resumed run finds on record of the step it goes on from."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import Checkpoint
from tandem.config.schema.run import RunConfig
from tandem.driver.run_folder import (
    inspect_run_folder,
    is_logged,
    is_validated,
    name_unwritable,
    open_run_folder,
)
from tandem.errors import UserError
from tandem.metrics.jsonl import METRICS_FILE

LOGGED = {"step": 4, "actor/loss": 1.0}
VALIDATED = {"step": 4, "val-core/some/reward/mean@1": 0.5, "timing_s/testing": 2.0}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{**VALIDATED, "step": 3}], (False, False)),
        ([{**VALIDATED, "step": 3}, LOGGED], (True, False)),
        ([LOGGED, VALIDATED], (True, True)),
        ([LOGGED | VALIDATED], (True, True)),
    ],
)
def test_a_step_may_be_logged_without_its_validation(
    tmp_path: Path, records: list[dict[str, float]], expected: tuple[bool, bool]
) -> None:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / METRICS_FILE).write_text(lines)
    checkpoint = Checkpoint(tmp_path / "global_step_4", step=4)
    assert (is_logged(checkpoint, tmp_path), is_validated(checkpoint, tmp_path)) == expected
    assert is_validated(checkpoint, tmp_path / "another")


def _config(folder: Path) -> RunConfig:
    trainer = {"default_local_dir": str(folder), "resume_mode": "disable"}
    return RunConfig.model_validate({"trainer": trainer})


@pytest.mark.parametrize("name", ["file/run", "file", "x" * 300, "new/" + "x" * 300])
def test_the_plan_refuses_a_folder_that_cannot_be_made_as_a_run_does(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    unread: Any = None
    rest: dict[str, Any] = {"model": unread, "key": "", "total_steps": 1}
    said: list[str] = []
    with pytest.raises(UserError) as planned:
        inspect_run_folder(_config(tmp_path / name), unread, **rest)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    said.append(str(planned.value))
    with (
        pytest.raises(UserError) as started,
        open_run_folder(_config(tmp_path / name), unread, **rest),
    ):
        pass
    assert said == [str(started.value)]
    assert said[0].startswith("trainer.default_local_dir=")


def test_the_plan_leaves_no_folder_behind(tmp_path: Path) -> None:
    unread: Any = None
    config = _config(tmp_path / "some/new/run")
    assert inspect_run_folder(config, unread, model=unread, key="", total_steps=1) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "some").mkdir()
    inspect_run_folder(config, unread, model=unread, key="", total_steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["some"]
    assert list((tmp_path / "some").iterdir()) == []


def test_a_full_disk_is_named_with_the_key_of_the_folder(tmp_path: Path) -> None:
    """An error of a write, unlike one of an open, has no name of a file."""
    rule = rf"^trainer.default_local_dir='{tmp_path}': cannot be written \(No space left\)\. "
    with pytest.raises(UserError, match=rule), name_unwritable(tmp_path):
        raise OSError(errno.ENOSPC, "No space left")


def test_the_home_of_an_unknown_user_is_a_plain_name() -> None:
    """As in a shell."""
    trainer = _config(Path("~no_such_user/run")).trainer
    assert trainer.run_folder == Path("~no_such_user/run")
