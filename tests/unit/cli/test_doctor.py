# SPDX-License-Identifier: Apache-2.0
"""The doctor tells what is there, what is missing and what for, and agrees with pyproject.toml."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tandem.children import code_jail
from tandem.children.jail_trial import Protection
from tandem.cli import doctor
from tandem.platforms.record import CPU

PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
MISSING_CORE = doctor.Dependency("no-such-package", "1.0", "showing what happens")
MISSING_EXTRA = doctor.Dependency("no-such-extra", "1.0", "one sink", is_core=False)
TOO_OLD = doctor.Dependency("pytest", "9999.1", "a version from the future")


def test_healthy_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run([]) == 0
    output = capsys.readouterr().out
    assert "The core can run" in output
    assert "problem:" not in output


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["--json"]) == 0
    diagnosis = json.loads(capsys.readouterr().out)
    assert diagnosis["problems"] == []
    assert diagnosis["torch"]["version"]
    assert diagnosis["cpu_cores"] >= 1
    assert diagnosis["platform"]["name"] and diagnosis["platform"]["reason"]
    assert "musa" in diagnosis["platform"]["others"]
    assert {"name", "version", "purpose"} <= diagnosis["dependencies"][0].keys()


def test_a1_the_platform_is_told_with_the_reason_and_why_no_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A1."""
    doctor.run([])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("platform ")]
    assert "not used      musa     the package torch_musa is not installed" in lines


def test_a1_a_platform_that_is_wanted_and_not_here_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A1."""
    monkeypatch.setenv("VERL_PLATFORM", "ascend")
    (problem,) = doctor.diagnose(doctor.declared_dependencies()).problems
    assert problem.startswith(
        "VERL_PLATFORM='ascend': npu cannot be used here: the package torch_npu"
    )


def test_missing_core_package_is_a_problem_with_its_purpose() -> None:
    diagnosis = doctor.diagnose([MISSING_CORE, MISSING_EXTRA])
    assert diagnosis.problems == ("no-such-package is missing: showing what happens",)


def test_old_version_is_a_problem() -> None:
    (problem,) = doctor.diagnose([TOO_OLD]).problems
    assert "too old, at least 9999.1" in problem


def test_a_problem_gives_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "declared_dependencies", lambda: [MISSING_CORE])
    assert doctor.run([]) == 2
    output = capsys.readouterr().out
    (line,) = [line for line in output.splitlines() if "no-such-package" in line]
    assert line.startswith("NO  no-such-package missing")
    assert "pip install" in output


def test_each_device_is_called_by_its_own_name() -> None:
    current = {"index": 0}
    platform = replace(
        CPU,
        num_devices=lambda: 2,
        use_device=lambda index: current.update(index=index),
        device_name=lambda: f"chip {current['index']}",
    )
    assert [doctor._device_name(platform, index) for index in range(2)] == ["chip 0", "chip 1"]


def test_what_holds_code_of_a_model_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.run([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("jail ")]
    assert [line.split()[1] for line in lines] == [
        *("files", "network", "processes", "signals", "tracing", "memory", "time", "privileges"),
    ]


def test_m20_a_protection_that_is_missing_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    protections = (Protection("files", "write", ""), Protection("time", "run", "rlimits"))
    monkeypatch.setattr(code_jail, "survey_protections", lambda: protections)
    diagnosis = doctor.diagnose([])
    assert any("does not hold code that a model wrote (files)" in w for w in diagnosis.warnings)
    assert "jail          files      NOT HELD: a program could write" in doctor._lines(diagnosis)


def test_versions_compare_by_number() -> None:
    diagnosis = doctor.diagnose([doctor.Dependency("pytest", "8.3.0rc1", "tests")])
    assert diagnosis.problems == ()


def test_each_declared_package_has_a_purpose() -> None:
    project = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    stated = project["dependencies"] + extras["wandb"] + extras["plot"] + extras["cluster"]
    stated += extras["data"]
    names = {Requirement(line).name for line in stated}
    assert names == {*doctor.CORE, *doctor.OPTIONAL}


def test_lowest_versions_are_those_of_the_metadata() -> None:
    found = {one.name: one for one in doctor.declared_dependencies()}
    assert found["pydantic"].min_version == "2.9" and found["pydantic"].is_core
    assert found["torch"].min_version == "2.11", "the bound from above is another one"
    assert found["ray"].min_version == "2.55" and not found["ray"].is_core


def test_a_pre_release_counts_as_the_release() -> None:
    alpha = doctor.Dependency("torch", "2.11", "tensors", version="2.11.0a0+git1234")
    assert alpha.problem == ""
