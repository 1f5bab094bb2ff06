# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and started again until it ends is the run that was never killed, bit by
bit: weights, optimizer, order of the data, metrics, rollouts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes.commands import Command, Conditions, run_command
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    repeatable,
    sft_arguments,
    train_arguments,
)

MAX_ATTEMPTS = 30
CHECKPOINT_FILES = ("actor/model.safetensors", "actor/optimizer.pt", "pipeline.json")

Arguments = Callable[[Path], list[str]]


def grpo(material: Material, run: Path) -> list[str]:
    """Six steps with two optimizer steps each, KL control and validation; each step is saved."""
    return train_arguments(
        material,
        run,
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "data.train_max_samples=18",
        "trainer.total_training_steps=6",
        "trainer.test_freq=2",
        "trainer.save_freq=1",
    )


def dapo(material: Material, run: Path) -> list[str]:
    """Six steps of dynamic sampling, of which every second is saved."""
    return train_arguments(
        material,
        run,
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        "custom_reward_function.name=rarely_right",
        "data.val_files=[]",
        "trainer.total_training_steps=6",
        "trainer.save_freq=2",
    )


def sft(material: Material, run: Path) -> list[str]:
    """Six steps with validation; each step is saved."""
    return sft_arguments(material, run, "trainer.test_freq=2", "trainer.save_freq=1")


RECIPES = {"grpo": grpo, "dapo": dapo, "sft": sft}


@pytest.fixture(scope="module", params=RECIPES)
def whole(
    request: pytest.FixtureRequest, material: Material, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Arguments]:
    """An uninterrupted run, and the arguments for one like it in another folder."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = RECIPES[request.param]
    ended = run_command(recipe(material, folder / "run"), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run", lambda run: recipe(material, run)


def check_same_run(run: Path, whole: Path) -> None:
    """All that a run leaves behind, but for times and the folder's own name."""
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole))
    for name in ("rollouts.jsonl", "latest_checkpointed_iteration.txt"):
        ours, theirs = (path / name for path in (run, whole))
        assert ours.exists() == theirs.exists()
        assert not ours.exists() or ours.read_bytes() == theirs.read_bytes()
    checkpoints = {path.name for path in whole.glob("global_step_*")}
    assert {path.name for path in run.glob("global_step_*")} == checkpoints
    for checkpoint in checkpoints:
        for name in CHECKPOINT_FILES:
            ours, theirs = (path / checkpoint / name for path in (run, whole))
            assert ours.read_bytes() == theirs.read_bytes(), f"{checkpoint}/{name} differs"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_before_random_file_operations(
    seed: int, whole: tuple[Path, Arguments], tmp_path: Path
) -> None:
    """So that every moment of a save has its chance, however short it is."""
    finished, arguments = whole
    run, draw = tmp_path / "run", random.Random(seed)
    for attempt in range(MAX_ATTEMPTS):
        conditions = Conditions(die_at=draw.randint(4, 45))
        ended = run_command(arguments(run), folder=tmp_path, conditions=conditions)
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended.stderr
    assert ended.code == 0 and attempt > 0, "it was never killed, or never ended"
    check_same_run(run, finished)


@pytest.mark.parametrize("seed", [4, 5])
def test_killed_at_random_times(seed: int, whole: tuple[Path, Arguments], tmp_path: Path) -> None:
    finished, arguments = whole
    run, draw = tmp_path / "run", random.Random(seed)
    for _ in range(4):
        command = Command(arguments(run), folder=tmp_path)
        command.wait_for(tmp_path / "stdout.txt", text="step:")
        time.sleep(draw.uniform(0, 0.1))
        command.signal(signal.SIGKILL)
        if command.wait().code == 0:
            break
    ended = run_command(arguments(run), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    check_same_run(run, finished)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("save_freq", [2, -1])
def test_a_signal_saves_the_last_finished_step(
    number: signal.Signals, save_freq: int, material: Material, tmp_path: Path
) -> None:
    def arguments(run: Path) -> list[str]:
        return [*grpo(material, run), f"trainer.save_freq={save_freq}"]

    run, whole_run = tmp_path / "run", tmp_path / "whole/run"
    command = Command(arguments(run), folder=tmp_path)
    command.wait_for(tmp_path / "stdout.txt", text="step:3 ")
    command.signal(number)
    ended = command.wait()
    assert ended.code == 128 + number, ended.stderr
    last = max(metrics_of(run))
    assert 3 <= last < 6
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(last)

    assert run_command(arguments(run), folder=tmp_path).code == 0
    assert run_command(arguments(whole_run), folder=tmp_path / "whole").code == 0
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole_run))
    rollouts = [folder / "rollouts.jsonl" for folder in (run, whole_run)]
    assert rollouts[0].read_bytes() == rollouts[1].read_bytes()


def test_a_signal_before_the_first_step_leaves_no_checkpoint(
    material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow = "custom_reward_function.name=slow"
    command = Command([*grpo(material, run), slow], folder=tmp_path)
    command.wait_for(run / "config.json")
    command.signal(signal.SIGTERM)
    command.signal(signal.SIGTERM)
    assert command.wait().code in (128 + signal.SIGTERM, -signal.SIGTERM)
    assert not list(run.glob("*step_*"))


def test_reward_processes_end_with_a_killed_command(material: Material, tmp_path: Path) -> None:
    keys = ("custom_reward_function.name=slow", "reward.num_workers=3", "data.val_files=[]")
    command = Command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    children = wait_for_children(command.pid, count=3)
    command.signal(signal.SIGKILL)
    command.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


def wait_for_children(pid: int, *, count: int) -> list[psutil.Process]:
    """The processes below ``pid`` once there are ``count``."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= count:
            return children
        time.sleep(0.02)
    raise AssertionError(f"{pid} has not got {count} children; this is {os.getpid()}")
