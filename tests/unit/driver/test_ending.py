# SPDX-License-Identifier: Apache-2.0
"""The lines at the end of a run name its model and the next commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.trainer import TrainerConfig
from tandem.driver.ending import describe_end
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.pipeline.progress import RunSummary


def lines_after(
    run: Path,
    *,
    saved: int | None,
    stopped: bool = False,
    step: int = 4,
    num_left: int = 0,
    **trainer: object,
) -> tuple[str, ...]:
    if saved is not None:
        with CheckpointStore(run).writing(saved, {}) as folder:
            (folder / "actor").mkdir()
            if trainer.pop("sharded", False):
                (folder / "actor" / SHARDED_FILE).write_text("{}")
    config = TrainerConfig.model_validate({"default_local_dir": str(run), **trainer})
    return describe_end(config, RunSummary(step, stopped, {}, num_left), total_steps=9)


def test_a_finished_run_names_its_model(tmp_path: Path) -> None:
    run = tmp_path / "my run"
    assert lines_after(run, saved=4) == (
        f"step 4 of 9; the model is in {run}/global_step_4/actor",
        f"next: tandem report '{run}'",
        f"next: tandem sample '{run}' PROMPT",
        f"next: tandem export '{run}' --output MODEL",
    )


def test_prompts_that_are_left_over_are_counted(tmp_path: Path) -> None:
    first = lines_after(tmp_path, saved=4, num_left=3)[0]
    assert first.startswith("step 4 of 9; 3 prompt(s) left over at the end of the data; the model")


def test_a_stopped_run_says_where_it_goes_on(tmp_path: Path) -> None:
    model = f"{tmp_path}/global_step_4/actor"
    assert lines_after(tmp_path, saved=4, stopped=True)[0] == (
        f"stopped after step 4 of 9; the model is in {model}; the same command continues from there"
    )


def test_a_sharded_checkpoint_is_not_called_a_model(tmp_path: Path) -> None:
    first = lines_after(tmp_path, saved=4, sharded=True)[0]
    assert first.endswith(f"; the checkpoint is in {tmp_path}/global_step_4")


@pytest.mark.parametrize(
    ("step", "reason"), [(4, "trainer.save_freq=0"), (0, "nothing was trained")]
)
def test_a_run_without_a_checkpoint_says_so(step: int, reason: str, tmp_path: Path) -> None:
    first, second = lines_after(tmp_path, saved=None, step=step)
    assert first == f"step {step} of 9; no checkpoint was written: {reason}"
    assert second == f"next: tandem report {tmp_path}"


def test_a_validation_names_the_report_alone(tmp_path: Path) -> None:
    assert lines_after(tmp_path, saved=4, val_only=True) == (f"next: tandem report {tmp_path}",)
