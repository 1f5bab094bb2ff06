# SPDX-License-Identifier: Apache-2.0
"""Which failures are followed by a restart, from which checkpoint, and what is on record."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tandem.api import EngineFailure
from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.run import RunConfig
from tandem.driver.restarts import Failure, Restarts, failure_of
from tandem.errors import RunFailure
from tests.fakes.configured import config

LOST = Failure("generate rank 0 died", step=4)


def configured(folder: Path, *keys: str) -> RunConfig:
    return config(f"trainer.default_local_dir={folder}", "trainer.max_restarts=3", *keys)


def save(folder: Path, step: int) -> None:
    with CheckpointStore(folder).writing(step, {"step": step}):
        pass


def log(folder: Path, *steps: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in steps))


def test_a_failure_is_described_by_one_line() -> None:
    failure = RunFailure("step 3: a died\nTraceback", step=3)
    assert failure_of(failure) == Failure("step 3: a died", step=3)
    assert failure_of(RunFailure("gone", restarts_elsewhere=True)).is_ordered
    assert failure_of(RuntimeError("out of luck\nat 7")).cause == "RuntimeError: out of luck"
    assert failure_of(EngineFailure()).cause == "EngineFailure"


def test_no_restart_unless_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    restarts = Restarts(configured(tmp_path, "trainer.max_restarts=0"))
    assert not restarts.is_possible
    assert restarts.after(LOST) is None
    assert not caplog.messages


def test_a_run_without_a_checkpoint_starts_anew_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    restarts = Restarts(configured(tmp_path))
    assert restarts.is_possible
    assert restarts.after(LOST) is not None
    assert not restarts.is_possible
    assert restarts.after(LOST) is None
    assert caplog.messages == [
        "restart 1 of 3: the run continues from the first step",
        "the run is not started again: no checkpoint was written since restart 1",
    ]


def test_restarts_go_on_as_long_as_checkpoints_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    restarts = Restarts(configured(tmp_path))
    for step in (2, 4, 6):
        save(tmp_path, step)
        assert restarts.after(LOST) is not None
    save(tmp_path, 8)
    assert restarts.after(LOST) is None
    assert [record["continues_after"] for record in restarts.records] == [2, 4, 6]
    assert caplog.messages == [
        "restart 1 of 3: the run continues after step 2",
        "restart 2 of 3: the run continues after step 4",
        "restart 3 of 3: the run continues after step 6",
        "the run is not started again: trainer.max_restarts=3 restarts are used up",
    ]


@pytest.mark.parametrize(
    ("keys", "step"),
    [
        ((), 8),
        (("trainer.resume_mode=disable",), 0),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_5"), 5),
    ],
    ids=["auto", "disable", "resume_path"],
)
def test_a_checkpoint_of_an_earlier_run_is_used_as_at_the_first_start(
    keys: tuple[str, ...], step: int, tmp_path: Path
) -> None:
    """Until the run has a checkpoint of its own, which may have the number of an earlier one."""
    save(tmp_path, 8)
    given = configured(tmp_path, *keys)
    restarts = Restarts(given)
    assert restarts.after(LOST) == given
    assert restarts.records[-1]["continues_after"] == step
    save(tmp_path, 8)
    following = restarts.after(LOST)
    assert following is not None and following.trainer.resume_mode == "auto"
    assert restarts.records[-1]["continues_after"] == 8
    assert following.model_dump(exclude={"trainer"}) == given.model_dump(exclude={"trainer"})


def test_records_name_the_step_and_are_written_once_or_again_where_they_are_missing(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    save(run, 2)
    log(run, 1, 2)
    restarts = Restarts(configured(run))
    restarts.after(Failure("at the start"))
    save(run, 4)
    log(run, 1, 2, 3, 4, 5)
    restarts.after(Failure("killed"))
    save(run, 6)
    restarts.after(LOST)
    restarts.write_records()
    restarts.write_records()
    path = run / "restarts.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(r["restart"], r["step"], r["cause"], r["continues_after"]) for r in records]
    expected = [(1, 3, "at the start", 2), (2, 6, "killed", 4), (3, 4, LOST.cause, 6)]
    assert found == expected
    path.rename(tmp_path / "aside")
    restarts.write_records()
    assert path.read_text() == (tmp_path / "aside").read_text()


def test_a_member_follows_the_node_that_drives_the_run(tmp_path: Path) -> None:
    given = configured(tmp_path)
    restarts = Restarts(given)
    for _ in range(5):
        assert restarts.after(Failure("vanished", is_ordered=True)) is given
    assert not restarts.records
