# SPDX-License-Identifier: Apache-2.0
"""The Python API trains what the command line trains, bit by bit, wherever it is called."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.data.files import read_rows
from tandem.engines.single import SingleDeviceEngine
from tests.fakes.commands import run_command
from tests.fakes.rewards import broken, graded
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    sft_arguments,
    train_arguments,
)

ROOT = Path(__file__).parents[2]
LAST_VALIDATED = "trainer.test_freq=1000"
"""The frequency by which commands, as the Python API by itself, validate the last step only."""
KEYS: dict[str, Any] = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 96,
    "data.max_response_length": 12,
    "actor_rollout_ref.actor.optim.lr": 0.01,
    "actor_rollout_ref.rollout.n": 4,
    "trainer.total_training_steps": 4,
}
SCRIPT = """
import asyncio, json, sys
import tandem

arguments = json.loads(sys.argv[1])

def graded(response, **_):
    import zlib
    return zlib.crc32(response.encode()) % 5 / 4

async def notebook():
    run = tandem.train(rewards=graded, **arguments)
    print(run.model_folder)

asyncio.run(notebook())
"""
Metrics = dict[int, dict[str, float]]


def short_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of prompts with short columns."""
    return [
        {
            "prompt": row["prompt"],
            "ground_truth": row["reward_model"]["ground_truth"],
            "data_source": row["data_source"],
            "index": row["extra_info"]["index"],
        }
        for row in read_rows([str(path)])
    ]


def train(material: Material, folder: Path, **changes: Any) -> tandem.Run:
    """Call ``tandem.train`` as the command of ``train_arguments``; ``changes`` win."""
    given: dict[str, Any] = {
        "model": material.policy,
        "data": short_rows(material.train),
        "validation": short_rows(material.test),
        "rewards": graded,
        "keys": KEYS,
        "folder": folder,
    }
    return tandem.train(**given | changes)


@pytest.fixture(scope="module")
def of_command(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The metrics of the command line."""
    folder = tmp_path_factory.mktemp("command")
    ended = run_command(train_arguments(material, folder / "run", LAST_VALIDATED), folder=folder)
    assert ended.code == 0, ended.stderr
    return repeatable(metrics_of(folder / "run"))


def in_a_loop(function: Callable[[], object]) -> None:
    """Call a function where an event loop runs, as a cell of a notebook is."""

    async def cell() -> None:
        function()

    asyncio.run(cell())


def in_a_thread(function: Callable[[], object]) -> None:
    """Call a function on another thread."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


@pytest.mark.parametrize("call", [lambda function: function(), in_a_loop, in_a_thread])
def test_equals_the_command_line(
    call: Callable[[Callable[[], object]], object],
    material: Material,
    tmp_path: Path,
    of_command: Metrics,
) -> None:
    seen: list[int] = []
    threads: set[str] = set()

    def on_step(report: tandem.StepMetrics) -> None:
        seen.append(report.step)
        threads.add(threading.current_thread().name)
        assert report.metrics["critic/score/mean"] >= 0
        assert "val-core/openai/gsm8k/acc/mean@1" in report.validation

    call(lambda: train(material, tmp_path, on_step=on_step))
    assert repeatable(metrics_of(tmp_path)) == of_command
    assert seen == [1, 2, 3, 4] and len(threads) == 1
    run = tandem.load_run(tmp_path)
    scores = "val-core/openai/gsm8k/acc/mean@1"
    assert [step for step, _ in run.points[scores]] == [0, 4]
    assert run.steps == 4 and run.model_folder.parent == run.checkpoints[-1]
    scores = [of_command[step]["critic/score/mean"] for step in (1, 2, 3, 4)]
    assert run.metrics["critic/score/mean"] == scores
    assert run.config["actor_rollout_ref"]["rollout"]["n"] == 4
    assert run.report().read_text().startswith("<!")
    assert str(tmp_path) in run._repr_html_()


@pytest.mark.deep
def test_two_processes_beside_a_running_loop_equal_the_command_line(
    material: Material, tmp_path: Path
) -> None:
    devices = {"trainer.n_gpus_per_node": 2, "trainer.device": "cpu"}
    arguments = {
        "model": str(material.policy),
        "data": short_rows(material.train),
        "validation": short_rows(material.test),
        "keys": KEYS | devices,
        "folder": str(tmp_path / "python"),
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (Path(done.stdout.splitlines()[-1]) / "model.safetensors").exists()
    overrides = [LAST_VALIDATED, *(f"{key}={value}" for key, value in devices.items())]
    ended = run_command(train_arguments(material, tmp_path / "run", *overrides), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    ours = repeatable(metrics_of(tmp_path / "python"))
    assert ours == repeatable(metrics_of(tmp_path / "run")) and set(ours) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_script_with_a_closed_output_trains(
    closed: str, material: Material, tmp_path: Path
) -> None:
    arguments = {
        "model": str(material.policy),
        "data": short_rows(material.train),
        "keys": KEYS | {"trainer.total_training_steps": 1},
        "folder": str(tmp_path / "run"),
    }
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shell = ["sh", "-c", f'"$0" "$@" {closed}', sys.executable, script, json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(shell, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert tandem.load_run(tmp_path / "run").steps == 1


@pytest.mark.parametrize("call", [lambda function: function(), in_a_loop])
def test_an_interrupted_run_is_saved_and_continues(
    call: Callable[[Callable[[], object]], object],
    material: Material,
    tmp_path: Path,
    of_command: Metrics,
) -> None:
    def interrupt(report: tandem.StepMetrics) -> None:
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(tandem.Interrupted, match="SIGINT.*continues it") as caught:
        call(lambda: train(material, tmp_path, on_step=interrupt))
    assert signal.getsignal(signal.SIGINT) is handler
    assert caught.value.run.folder == tmp_path and caught.value.run.checkpoints
    assert isinstance(caught.value, KeyboardInterrupt)
    train(material, tmp_path)
    assert repeatable(metrics_of(tmp_path)) == of_command


def test_a_program_may_change_its_directory_while_it_trains(
    material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = train(material, Path("run"), on_step=lambda _: os.chdir(tmp_path / "elsewhere"))
    assert run.folder == tmp_path / "run" and run.steps == 4 and run.model_folder.is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_callback_ends_the_run_by_an_exception(material: Material, tmp_path: Path) -> None:
    def stop(report: tandem.StepMetrics) -> None:
        if report.step == 2:
            raise tandem.StopTraining

    run = train(material, tmp_path / "stopped", on_step=stop)
    assert run.steps == 2 and [folder.name for folder in run.checkpoints] == ["global_step_2"]

    def fail(report: tandem.StepMetrics) -> None:
        raise ValueError("a mistake in the callback")

    with pytest.raises(ValueError, match="a mistake in the callback") as caught:
        train(material, tmp_path / "failed", on_step=fail)
    assert str(tmp_path / "failed") in caught.value.__notes__[0]
    assert [path.name for path in tandem.load_run(tmp_path / "failed").checkpoints] == [
        "global_step_1"
    ]


def test_supervised_fine_tuning_equals_the_command_line(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", LAST_VALIDATED)
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    of_run = repeatable(metrics_of(tmp_path / "run"))

    def stop(report: tandem.StepMetrics) -> None:
        if report.step == 3:
            raise tandem.StopTraining

    rows = read_rows([str(material.demonstrations)])
    given: dict[str, Any] = {
        "model": material.policy,
        "data": rows,
        "validation": rows,
        "keys": {
            "data.train_batch_size": 8,
            "data.max_length": 128,
            "optim.lr": 0.01,
            "trainer.total_training_steps": 6,
        },
        "folder": tmp_path / "python",
    }
    assert tandem.sft(**given, on_step=stop).steps == 3
    tandem.sft(**given)
    assert repeatable(metrics_of(tmp_path / "python")) == of_run
    assert [step for step, metrics in of_run.items() if "val/loss" in metrics] == [6]


def test_wrong_arguments_are_refused_with_their_names(material: Material, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(response: str, **_: object) -> float:
        with lock:
            return float(len(response))

    def wrong(prompts: object) -> float:
        return 1.0

    for key, changes in {
        "rewards['locked']": {"rewards": locked},
        "rewards['mine']": {"rewards": {"mine": 3}},
        "custom_reward_function.name": {"rewards": wrong},
        "actor_rollout_ref.rollout.num": {"keys": {"actor_rollout_ref.rollout.num": 8}},
        "actor_rollout_ref.model.path": {"keys": {"actor_rollout_ref.model.path": "x"}},
        "trainer.default_local_dir": {"keys": {"trainer.default_local_dir": "x"}},
        "validation": {"validation": 1.5},
        "data": {"data": 3, "validation": 0.5},
        "train": {"data": [{"prompt": lock}]},
        "data.train_files": {"data": [{"prompt": "2?", "extra_info": "abc"}]},
        "model": {"model": None},
        "keys": {"keys": "x=1"},
    }.items():
        with pytest.raises(tandem.UserError) as caught:
            train(material, tmp_path, **changes)
        assert caught.value.key == key
        assert caught.value.rule and caught.value.remedy


def test_a_failed_run_starts_again_in_the_same_process(
    material: Material, tmp_path: Path, of_command: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine fails in step 3 once; then in every step, so that no checkpoint is written."""
    calls: list[int] = []
    fails_at = {3}

    def update(engine: SingleDeviceEngine, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] in fails_at:
            raise RuntimeError("as a test wants")
        return original(engine, *args, **kwargs)

    original = SingleDeviceEngine.update
    monkeypatch.setattr(SingleDeviceEngine, "update", update)
    keys = KEYS | {"trainer.max_restarts": 5, "trainer.save_freq": 1}
    run = train(material, tmp_path, keys=keys)
    assert repeatable(metrics_of(tmp_path)) == of_command
    (restart,) = read_lines(tmp_path / "restarts.jsonl")
    assert (restart["step"], restart["continues_after"]) == (3, 2)
    assert restart["cause"] == "RuntimeError: as a test wants"
    assert restart["cause"] in run.report().read_text()

    calls.clear()
    fails_at.update(range(2, 9))
    with pytest.raises(RuntimeError, match="as a test wants"):
        train(material, tmp_path, keys=keys | {"trainer.total_training_steps": 8})
    assert calls == [1, 2, 3], "no step was trained after the first restart"


def test_mistakes_and_requests_are_not_followed_by_a_restart(
    material: Material, tmp_path: Path
) -> None:
    def stop(_: tandem.StepMetrics) -> None:
        raise ValueError("enough")

    keys = KEYS | {"trainer.max_restarts": 5}
    with pytest.raises(ValueError, match="enough"):
        train(material, tmp_path / "stopped", on_step=stop, keys=keys)
    with pytest.raises(tandem.UserError, match="out of order"):
        train(material, tmp_path / "wrong", rewards=broken, keys=keys)
    assert not list(tmp_path.rglob("restarts.jsonl"))
