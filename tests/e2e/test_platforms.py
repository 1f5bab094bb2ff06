# SPDX-License-Identifier: Apache-2.0
"""Commands on platforms: doubles of vendors' devices, absent ones, those of strangers."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.platforms.record import Platform
from tandem.testing.doubles import write_vendor_package
from tests.fakes.commands import Conditions, Ended, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, sft_arguments, train_arguments

TOLERANCE = 1e-6
FP32 = "actor_rollout_ref.actor.fsdp_config.dtype=float32"
ACME = """
from dataclasses import replace
from tandem.platforms.record import CPU
PLATFORM = replace(CPU, name="acme", vendor="Acme", aliases=())
"""


def run_with(path: Path, arguments: list[str], *, folder: Path, **environment: str) -> Ended:
    """A command that finds packages in ``path``."""
    variables = {"PYTHONPATH": str(path)} | environment
    return run_command(arguments, folder=folder, conditions=Conditions(environment=variables))


def compare(found: Path, expected: Path, *, metric: str) -> None:
    """All metrics of both runs, but for what differs between machines."""
    ours, theirs = (repeatable(metrics_of(run)) for run in (found, expected))
    assert ours.keys() == theirs.keys() and metric in ours[2]
    for step, row in theirs.items():
        assert ours[step] == pytest.approx(row, rel=TOLERANCE, abs=TOLERANCE), step


@pytest.mark.parametrize("name", ["musa"])
def test_a5_steps_on_a_double_equal_those_on_the_host(
    material: Material, tmp_path: Path, doubles: Callable[..., Platform], name: str
) -> None:
    """A5."""
    write_vendor_package(tmp_path / "path", doubles(name).name, num_devices=1)
    commands = {
        "grpo": (train_arguments, FP32, "actor/pg_loss"),
        "sft": (sft_arguments, "engine.dtype=float32", "train/loss"),
    }
    for kind, (arguments, precision, metric) in commands.items():
        for device in (name, "cpu"):
            run = tmp_path / f"{kind}-{device}"
            keys = (f"trainer.device={device}", precision, "trainer.total_training_steps=2")
            ended = run_with(
                tmp_path / "path", arguments(material, run, *keys), folder=tmp_path / device
            )
            assert ended.code == 0, ended.stderr
            used = metrics_of(run)[2].get("perf/max_memory_allocated_gb", 0)
            assert kind == "sft" or (used > 0) == (device != "cpu")
        compare(tmp_path / f"{kind}-{name}", tmp_path / f"{kind}-cpu", metric=metric)


def test_a1_a_platform_that_is_not_here_is_named_with_the_reason(
    material: Material, tmp_path: Path
) -> None:
    """A1."""
    ended = run_command(
        train_arguments(material, tmp_path / "run", "trainer.device=mthreads"), folder=tmp_path
    )
    (error,) = ended.errors
    assert ended.code == 2
    assert "trainer.device='musa': musa cannot be used here" in error
    assert "torch_musa is not installed" in error and "Name one that can: cpu" in error
    assert not (tmp_path / "run").exists()
    ended = run_with(tmp_path, ["doctor"], folder=tmp_path, VERL_PLATFORM="musa")
    assert ended.code == 2
    assert "VERL_PLATFORM='musa': musa cannot be used here: the package torch_musa" in ended.stdout


def write_wheel(folder: Path, name: str, code: str) -> Path:
    """A package of one module that declares a platform of its own name."""
    folder.mkdir(parents=True, exist_ok=True)
    path, info = folder / f"{name}_platform-1.0-py3-none-any.whl", f"{name}_platform-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}_platform.py", code)
        entry = f"[tandem.platforms]\n{name} = {name}_platform:PLATFORM\n"
        wheel.writestr(f"{info}/entry_points.txt", entry)
        metadata = f"Metadata-Version: 2.1\nName: {name}-platform\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        files = (f"{name}_platform.py", *(f"{info}/{x}" for x in ("METADATA", "WHEEL", "RECORD")))
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return path


def test_a4_a_platform_of_another_package_trains_and_a_broken_one_hurts_nobody_else(
    material: Material, tmp_path: Path
) -> None:
    """A4."""
    path = tmp_path / "site"
    for name, code in (("acme", ACME), ("broken", "import no_such_driver\n")):
        with zipfile.ZipFile(write_wheel(tmp_path / "wheels", name, code)) as wheel:
            wheel.extractall(path)  # as installing a wheel of pure Python does
    keys = ("trainer.device=acme", "trainer.total_training_steps=1")
    ended = run_with(path, train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert 1 in metrics_of(tmp_path / "run")
    ended = run_with(
        path, train_arguments(material, tmp_path / "no", "trainer.device=broken"), folder=tmp_path
    )
    (error,) = ended.errors
    assert ended.code == 2
    assert "trainer.device='broken': its plug-in broken_platform:PLATFORM cannot be loaded" in error
    assert "ModuleNotFoundError: No module named 'no_such_driver'" in error
    ended = run_with(path, ["doctor"], folder=tmp_path)
    assert ended.code == 0
    assert "broken   its plug-in broken_platform:PLATFORM cannot be loaded" in ended.stdout
    assert "acme     can be used" not in ended.stdout and "platform      acme" in ended.stdout
