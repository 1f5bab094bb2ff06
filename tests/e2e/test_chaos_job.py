# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make chaos``: a minute of random kills in the modes of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.job import run_chaos
from tests.chaos.modes import DUMPS, MODES, NUM_STEPS, write_materials
from tests.chaos.trials import Kill, Trial, check_cause, compare, outcome_of


@pytest.mark.deep
def test_a_minute_of_kills_loses_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        materials = write_materials(tmp_path / "materials", patch=patch.setattr)
    modes = ("synchronous", "asynchronous, g=4", "agents")
    report = run_chaos(tmp_path, materials, seconds=45, seed=1, modes=modes)
    assert report["kills"] > 0
    assert report["details"] == {}


def write_run(run: Path, *, prompts: list[str], weights: bytes = b"w") -> Path:
    """What a finished run leaves, with two samples of one step in every dump."""
    (run / DUMPS).mkdir(parents=True)
    (run / f"global_step_{NUM_STEPS}").mkdir()
    (run / f"global_step_{NUM_STEPS}" / "model.safetensors").write_bytes(weights)
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, NUM_STEPS + 1))
    (run / "metrics.jsonl").write_text(rows)
    for step in range(1, NUM_STEPS + 1):
        lines = [f'{{"input": "{prompt} {step}", "gts": "1"}}\n' for prompt in prompts]
        (run / DUMPS / f"{step}.jsonl").write_text("".join(lines))
    return run


def test_the_job_sees_prompts_rows_and_weights_that_differ(tmp_path: Path) -> None:
    whole = outcome_of(write_run(tmp_path / "whole", prompts=["a", "b"]))
    same, other = Trial("synchronous"), Trial("synchronous")
    compare(same, MODES["synchronous"], run=tmp_path / "whole", whole=whole)
    assert same.problems == {}
    run = write_run(tmp_path / "other", prompts=["a", "a"], weights=b"v")
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 6, "x": 1}\n{"step": 6, "x": 1}\n')
    compare(other, MODES["synchronous"], run=run, whole=whole)
    expected = {"prompts_lost", "prompts_doubled", "rows_doubled", "weights_different"}
    assert other.problems.keys() == expected


@pytest.mark.parametrize(
    ("kill", "problem"),
    [
        (Kill("reward", "SIGKILL", 1.0, 0), None),
        (Kill("driver", "SIGTERM", 1.0, 143), None),
        (Kill("driver", "SIGTERM", 1.0, 1), "unnamed"),
        (Kill("raylet", "SIGKILL", 1.0, 1), "unnamed"),
        (Kill("raylet", "SIGKILL", 1.0, 1, "error: the node was lost", 2.0), None),
        (Kill("raylet", "SIGKILL", 1.0, 1, "error: the node was lost", 20.0), "late"),
    ],
)
def test_the_job_sees_deaths_that_nobody_named_in_time(kill: Kill, problem: str | None) -> None:
    trial = Trial("two processes")
    check_cause(trial, kill)
    assert list(trial.problems) == ([] if problem is None else [problem])
