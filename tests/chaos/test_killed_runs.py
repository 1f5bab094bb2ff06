# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and started again until it ends is the run that was never killed, bit by
bit: weights, optimizer, order of the data, metrics, rollouts.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest

from tandem.driver.execution import SAME_REQUEST_S
from tests.fakes.commands import TIMEOUT_S, Command, Conditions, Ended, run_command
from tests.fakes.patience import PATIENCE_S
from tests.fakes.seeing_files import RUN_KEYS, write_policy, write_rows
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    sft_arguments,
    train_arguments,
)

MAX_ATTEMPTS = 30
ENGINE_FILES = ("actor/model.safetensors", "actor/optimizer.pt")
CHECKPOINT_FILES = ("actor/*model.safetensors", "actor/optimizer.pt", "pipeline.json")


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


def lora(material: Material, run: Path) -> list[str]:
    """Four steps that train adapters, with a reference; each step is saved."""
    return train_arguments(
        material,
        run,
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "data.val_files=[]",
        "trainer.save_freq=1",
    )


def two_processes(material: Material, run: Path) -> list[str]:
    """``grpo`` on two devices."""
    return [*grpo(material, run), "trainer.n_gpus_per_node=2"]


def seeing(material: Material, run: Path) -> list[str]:
    """Three steps of a model that sees; each step is saved."""
    folder = run.parent / "seeing"
    if not folder.exists():
        write_rows(write_policy(folder) / "rows.parquet", 12)
    return [
        "train",
        f"actor_rollout_ref.model.path={folder}",
        f"data.train_files={folder / 'rows.parquet'}",
        f"trainer.default_local_dir={run}",
        *RUN_KEYS,
        "data.val_files=[]",
        "trainer.save_freq=1",
        "trainer.total_training_steps=3",
    ]


RECIPES = {"grpo": grpo, "dapo": dapo, "sft": sft}
ALL_RECIPES = {**RECIPES, "lora": lora, "seeing": seeing, "two processes": two_processes}
WholeRun = Callable[[str], Path]


@pytest.fixture(scope="module")
def whole_run(material: Material, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """The uninterrupted run of a recipe, made when it is first asked for."""

    @cache
    def run(recipe: str) -> Path:
        folder = tmp_path_factory.mktemp(recipe)
        ended = run_command(ALL_RECIPES[recipe](material, folder / "run"), folder=folder)
        assert ended.code == 0, ended.stderr
        return folder / "run"

    return run


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
        for pattern in CHECKPOINT_FILES:
            ours, theirs = ([*(path / checkpoint).glob(pattern)] for path in (run, whole))
            (one,), (other,) = ours, theirs
            assert one.read_bytes() == other.read_bytes(), f"{checkpoint}/{pattern} differs"
    assert not [path.name for path in run.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("recipe", "seed"),
    [("grpo", 1), ("grpo", 2), ("dapo", 1), ("sft", 1), ("lora", 1), ("seeing", 1)],
)
def test_23_killed_before_random_file_operations(
    recipe: str, seed: int, whole_run: WholeRun, material: Material, tmp_path: Path
) -> None:
    """So that every moment of a save has its chance, however short it is.

    L9: with adapters. VL13: with pictures.
    """
    run, draw = tmp_path / "run", random.Random(seed)
    codes: list[int] = []
    while 0 not in codes and len(codes) < MAX_ATTEMPTS:
        conditions = Conditions(die_at=draw.randint(15, 90))
        arguments = ALL_RECIPES[recipe](material, run)
        codes.append(run_command(arguments, folder=tmp_path, conditions=conditions).code)
    assert codes == [-signal.SIGKILL] * (len(codes) - 1) + [0]
    assert len(codes) > 1, "it was never killed"
    check_same_run(run, whole_run(recipe))


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
def test_a_killed_run_starts_again_by_itself(
    recipe: str, whole_run: WholeRun, material: Material, tmp_path: Path
) -> None:
    """Each of its processes is killed at the same file operation, and comes further than before."""
    run = tmp_path / "run"
    arguments = [*RECIPES[recipe](material, run), f"trainer.max_restarts={MAX_ATTEMPTS}"]
    ended = run_command(arguments, folder=tmp_path, conditions=Conditions(die_at=55))
    assert ended.code == 0, ended.stderr
    restarts = read_lines(run / "restarts.jsonl")
    assert [restart["restart"] for restart in restarts] == list(range(1, len(restarts) + 1))
    assert restarts[0]["cause"] == "the process of the run was killed by SIGKILL"
    assert len(ended.errors) == len(restarts)
    check_same_run(run, whole_run(recipe))


def test_dynamic_sampling_ahead_of_training_uses_each_prompt_once_whenever_it_is_killed(
    material: Material, tmp_path: Path
) -> None:
    """Prompts whose groups were dropped are gone for good; others are drawn again after a kill."""
    run, draw, num_prompts = tmp_path / "run", random.Random(5), 40
    arguments = [
        *dapo(material, run),
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "trainer.async_pipeline=True",
        "trainer.generate_ahead_steps=2",
        "trainer.save_freq=1",
        f"data.train_max_samples={num_prompts}",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=null",
        f"trainer.rollout_data_dir={run / 'dumps'}",
    ]
    starts: list[Ended] = []
    while len(starts) < MAX_ATTEMPTS and not (starts and starts[-1].code == 0):
        conditions = Conditions(die_at=draw.randint(15, 60))
        starts.append(run_command(arguments, folder=tmp_path, conditions=conditions))
    assert [start.code for start in starts] == [-signal.SIGKILL] * (len(starts) - 1) + [0]
    assert len(starts) > 1, "it was never killed"
    rows, said = metrics_of(run), starts[-1].stderr
    trained = [row for step in rows for row in read_lines(run / f"dumps/{step}.jsonl")]
    by_prompt = Counter(row["input"] for row in trained)
    assert set(by_prompt.values()) == {4} and len(by_prompt) == 4 * len(rows)
    dropped_since = sum(map(int, re.findall(r"(\d+) of \d+ groups dropped", said)))
    resumed_at = int((re.findall(r"resumed from .*global_step_(\d+)", said) or ["0"])[0])
    dropped_before = sum(rows[s]["training/dropped_groups"] for s in range(1, resumed_at + 1))
    (left_over,) = re.findall(r"(\d+) prompt\(s\) are left over", said) or ["0"]
    counted = len(by_prompt) + dropped_before + dropped_since + int(left_over)
    assert counted == num_prompts, said


@pytest.mark.parametrize("recipe", RECIPES)
def test_22_killed_at_random_times(
    recipe: str, whole_run: WholeRun, material: Material, tmp_path: Path
) -> None:
    run, draw = tmp_path / "run", random.Random(3)
    for _ in range(3):
        command = Command(RECIPES[recipe](material, run), folder=tmp_path)
        while command.is_running and "step " not in (tmp_path / "stdout.txt").read_text():
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        command.signal(signal.SIGKILL)
        command.wait()
    ended = run_command(RECIPES[recipe](material, run), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    check_same_run(run, whole_run(recipe))


@pytest.mark.parametrize("recipe", ["grpo", "sft"])
@pytest.mark.parametrize(
    "stop", [(signal.SIGTERM, 4), (signal.SIGINT, -1)], ids=["SIGTERM", "SIGINT without saving"]
)
def test_a_signal_saves_the_last_finished_step(
    recipe: str,
    stop: tuple[signal.Signals, int],
    whole_run: WholeRun,
    material: Material,
    tmp_path: Path,
) -> None:
    number, save_freq = stop
    run = tmp_path / "run"
    # A signal reaches the run through the process that would start it again after a failure.
    keys = (f"trainer.save_freq={save_freq}", f"trainer.max_restarts={stop[0] == signal.SIGTERM:d}")
    arguments = [*RECIPES[recipe](material, run), *keys]
    ended = run_until_signal(arguments, number, run=run, folder=tmp_path)
    assert ended.code == 128 + number, ended.stderr
    last = max(metrics_of(run))
    assert 1 <= last < 6
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert (
        f"stopped after step {last} of 6; the model is in {run}/global_step_{last}" in ended.stderr
    )
    for name in ENGINE_FILES:
        ours, theirs = (path / f"global_step_{last}" / name for path in (run, whole_run(recipe)))
        assert ours.read_bytes() == theirs.read_bytes()

    assert run_command(arguments, folder=tmp_path).code == 0
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole_run(recipe)))


def run_until_signal(
    arguments: list[str], number: signal.Signals, *, run: Path, folder: Path
) -> Ended:
    """Run, and send a signal after step 1. Tried again if the run was faster than the signal."""
    for _ in range(MAX_ATTEMPTS):
        command = Command([*arguments, "trainer.resume_mode=disable"], folder=folder)
        command.wait_for(folder / "stdout.txt", text="step 1/")
        command.signal(number)
        ended = command.wait()
        if ended.code != 0 and max(metrics_of(run), default=0) < 6:
            return ended
    raise AssertionError(f"the run was faster than the signal {MAX_ATTEMPTS} times")


def test_a_signal_within_the_first_step_leaves_no_checkpoint(
    material: Material, tmp_path: Path
) -> None:
    keys = ("custom_reward_function.name=slow", "data.val_files=[]")
    command = Command([*grpo(material, tmp_path / "run"), *keys], folder=tmp_path)
    wait_for_children(command.pid, count=2)
    command.signal(signal.SIGTERM)
    assert command.wait().code == 128 + signal.SIGTERM
    assert not list((tmp_path / "run").glob("*step_*"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_second_signal_ends_it_at_once(
    number: signal.Signals, code: int, material: Material, tmp_path: Path
) -> None:
    """The first one waits for an update that takes minutes; rollouts are recorded beside it."""
    keys = ("actor_rollout_ref.actor.ppo_epochs=1000000", "data.val_files=[]")
    command = Command([*grpo(material, tmp_path / "run"), *keys], folder=tmp_path)
    command.wait_for(tmp_path / "run" / "rollouts.jsonl", text="\n")
    children = wait_for_children(command.pid, count=2)
    command.signal(number)
    command.wait_for(tmp_path / "stderr.txt", text="send it again to stop at once")
    time.sleep(SAME_REQUEST_S)
    command.signal(number)
    assert command.wait().code == code
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("recipe", "save_freq"),
    [
        pytest.param("grpo", 1, id="a due save"),
        pytest.param("grpo", -1, id="the save of the stop"),
        pytest.param("sft", 1, id="a due save of demonstrations"),
        pytest.param("two processes", 1, id="a due save of two processes", marks=pytest.mark.deep),
    ],
)
def test_a_second_sigint_during_a_save_loses_and_doubles_nothing(
    recipe: str, save_freq: int, whole_run: WholeRun, material: Material, tmp_path: Path
) -> None:
    run, slow = tmp_path / "run", Conditions(slow_paths=".partial_step_")
    arguments = [*ALL_RECIPES[recipe](material, run), f"trainer.save_freq={save_freq}"]
    command = Command(arguments, folder=tmp_path, conditions=slow)
    command.wait_for(tmp_path / "stdout.txt", text="step 1/")
    if save_freq > 0:
        wait_for_save(command, run)
    command.signal(signal.SIGINT)
    command.wait_for(tmp_path / "stderr.txt", text="send it again to stop at once")
    begin_s = time.monotonic()
    wait_for_save(command, run)
    time.sleep(max(0.0, begin_s + SAME_REQUEST_S - time.monotonic()))
    command.signal(signal.SIGINT)
    ended = command.wait()
    assert ended.code == 130, ended.stderr
    assert "Traceback" not in ended.stderr and ended.stderr.endswith("interrupted\n")
    assert run_command(arguments, folder=tmp_path).code == 0
    # ``metrics_of`` fails if a metric of a step is there twice.
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole_run(recipe)))
    check_same_weights(run, whole_run(recipe))


def check_same_weights(run: Path, whole: Path) -> None:
    """Weights and optimizer of step 6, whole or in parts."""
    names = [path.name for path in (whole / "global_step_6/actor").iterdir()]
    files = [name for name in names if name.endswith((".safetensors", ".pt", ".distcp"))]
    assert files
    for name in files:
        ours, theirs = (path / "global_step_6/actor" / name for path in (run, whole))
        assert ours.read_bytes() == theirs.read_bytes(), f"{name} differs"


def test_what_others_leave_in_the_folder_of_a_run_changes_nothing(
    whole_run: WholeRun, material: Material, tmp_path: Path
) -> None:
    """Records that are cut or damaged after the checkpoint, stray files and folders, and a lock
    that is a symbolic link: finding 2 of the list of attacks.
    """
    run = Path(shutil.copytree(whole_run("grpo"), tmp_path / "run"))
    for step in (4, 5, 6):
        shutil.rmtree(run / f"global_step_{step}")
    (run / "latest_checkpointed_iteration.txt").write_text("3")
    for name, damage in (("metrics.jsonl", b"\x00\xff damaged\n{}\n"), ("rollouts.jsonl", b"")):
        content = (run / name).read_bytes()
        (run / name).write_bytes(content[:-20] + damage)
    (run / "stray" / "global_step_9").mkdir(parents=True)
    for name in (".partial_step_9", "notes", "elsewhere"):
        (run / name).write_text("of somebody")
    (run / "run.lock").symlink_to(run / "no_file")
    ended = run_command(grpo(material, run), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    check_same_run(run, whole_run("grpo"))
    assert (run / "notes").read_text() == "of somebody"


def wait_for_save(command: Command, run: Path) -> None:
    """Wait until a checkpoint is being written."""
    deadline = time.monotonic() + PATIENCE_S
    while not list(run.glob(".partial_step_*")):
        assert command.is_running and time.monotonic() < deadline, command.output()
        time.sleep(0.005)


def test_reward_processes_end_with_a_killed_command(material: Material, tmp_path: Path) -> None:
    keys = ("custom_reward_function.name=slow", "reward.num_workers=3", "data.val_files=[]")
    command = Command(train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    children = wait_for_children(command.pid, count=3)
    command.signal(signal.SIGKILL)
    assert "Traceback" not in command.wait().stderr
    _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
    assert not alive


def wait_for_children(pid: int, *, count: int) -> list[psutil.Process]:
    """The processes below ``pid`` once there are ``count``."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if len(children) >= count:
            return children
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has not got {count} children")


def test_a_second_run_in_the_same_folder_is_refused_and_harms_nothing(
    material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow = "custom_reward_function.name=slow"
    first = Command([*grpo(material, run), slow], folder=tmp_path / "first")
    wait_for_children(first.pid, count=2)
    for arguments in (grpo(material, run), sft(material, run)):
        ended = run_command(arguments, folder=tmp_path / "second")
        assert ended.code == 2
        (error,) = ended.errors
        assert f"trainer.default_local_dir='{run}'" in error
        assert f"(process {first.pid})" in error
    assert first.is_running
    first.signal(signal.SIGKILL)
    first.wait()
    ended = run_command(grpo(material, run), folder=tmp_path / "third")
    assert ended.code == 0, ended.stderr
    assert not (run / "run.lock").exists()
