# SPDX-License-Identifier: Apache-2.0
"""Runs of one and of several processes that generate with SGLang: they are runs of the native
engine, also if processes are killed, and leave no process.
"""

from __future__ import annotations

import json
import os
import signal
import uuid
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.chaos.processes import MARK, none_left, processes_with, wait_for_place
from tests.engines.groups import ends
from tests.fakes.commands import Command, Conditions, run_command
from tests.fakes.published_commands import RED_MOE_COMMAND, words_of
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

SGLANG = "sglang"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs.sglang"
SIZE = replace(TINY, hidden=64, num_kv_heads=2)


PLACES = {
    "on the device of the trainer": (),
    "on both devices of the trainer": ("trainer.n_gpus_per_node=2",),
}
APART = (
    "trainer.n_gpus_per_node=2",
    "trainer.separated_node_tasks=[[logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
)
RESTARTS = "actor_rollout_ref.rollout.max_engine_restarts"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("policy"), size=SIZE)


def _arguments(
    material: Material, run: Path, policy: Path, *keys: str, name: str = SGLANG
) -> list[str]:
    given = (
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.rollout.name={name}",
        f"{KWARGS}.python={PYTHON}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        *keys,
    )
    return train_arguments(material, run, *given)


@pytest.fixture(scope="module")
def native(material: Material, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the native engine, in one process."""
    folder = tmp_path_factory.mktemp("native")
    arguments = _arguments(material, folder / "run", policy, name="native")
    ended = run_command(arguments, folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


def _check_run(run: Path, native: Path) -> dict[int, dict[str, float]]:
    """Check that a run is that of the native engine, and return its metrics."""
    found, expected = metrics_of(run), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    for row in list(found.values())[1:]:
        assert row["training/rollout_logp_diff_max"] < 1e-4
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_run_with_sglang_is_that_of_the_native_engine(
    native: Path, material: Material, policy: Path, tmp_path: Path, place: str
) -> None:
    """What SGLang and its packages print is not among the messages of the run."""
    mark = uuid.uuid4().hex
    arguments = _arguments(material, tmp_path / "run", policy, *PLACES[place])
    conditions = Conditions(environment={MARK: mark})
    ended = run_command(arguments, folder=tmp_path, conditions=conditions)
    assert ended.code == 0, ended.stderr
    _check_run(tmp_path / "run", native)
    own = ("tandem ", "INFO tandem.", "WARNING tandem.")
    assert [line for line in ended.stderr.splitlines() if not line.startswith(own)] == []
    assert none_left(mark)


def test_v10_a_scheduler_and_a_worker_that_are_killed_are_replaced(
    native: Path, material: Material, policy: Path, tmp_path: Path
) -> None:
    """Each is killed after a step, whatever it does then. Every prompt is trained once."""
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    command = Command(
        _arguments(material, run, policy, *APART, f"{RESTARTS}=4"),
        folder=tmp_path,
        conditions=Conditions(environment={MARK: mark}),
    )
    worker = wait_for_place(command, run, "generate", rank=0)["pid"]
    command.wait_for(run / "metrics.jsonl", text='"step": 0')
    first, scheduler = _sglang_of(mark)
    scheduler.kill()
    command.wait_for(run / "metrics.jsonl", text='"step": 1')
    second, _ = _sglang_of(mark)
    os.kill(worker, signal.SIGKILL)
    assert ends(second)
    ended = command.wait()
    assert ended.code == 0, ended.stderr
    found = _check_run(run, native)
    assert max(row.get("rollout/engine/num_restarts", 0) for row in found.values()) >= 1
    assert "SGLang: process killed by SIGKILL" in ended.stderr
    assert f"It is started again (1 of {RESTARTS}=4)" in ended.stderr
    assert f"Another process takes its place (1 of {RESTARTS}=4)" in ended.stderr
    assert ends(first) and none_left(mark)


def _sglang_of(mark: str) -> tuple[int, psutil.Process]:
    """Return SGLang's process group in a run, and its scheduler, which changes its environment."""
    (engine,) = (
        process
        for process in processes_with(mark)
        if "tandem.rollout.sglang.program" in process.cmdline()
    )
    (scheduler,) = (
        child
        for child in engine.children(recursive=True)
        if "sglang::scheduler" in " ".join(child.cmdline())
    )
    return engine.pid, scheduler


SMALLER = {
    "data.train_batch_size": "4",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "4",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "1",
    "actor_rollout_ref.rollout.n": "4",
    "trainer.n_gpus_per_node": "4",
    "trainer.total_epochs": "1",
}
"""Sizes of dots.rl's command that are changed. The model has no experts."""


def test_the_command_of_dots_rl_trains_with_sglang(material: Material, tmp_path: Path) -> None:
    """Asynchronously, over four processes, with the reference and SGLang on devices of their own
    and staged weights. Each token has the log-prob of the version that drew it.
    """
    variables = {
        "ROOT_PATH": str(tmp_path),
        "TRAIN_DATA_PATH": str(material.train),
        "TEST_DATA_PATH": str(material.test),
        "MODEL_PATH": str(write_tiny_policy(tmp_path / "policy", size=SIZE)),
        "EXP_NAME": "run_1",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "max_prompt_length": "96",
        "max_response_length": "12",
    }
    words = words_of(RED_MOE_COMMAND, tmp_path, **variables)
    keys = (f"{KWARGS}.python={PYTHON}", "trainer.device=cpu", "trainer.total_training_steps=3")
    small = (SMALLER.get(word.partition("=")[0]) for word in words)
    named = (word.partition("=")[0] for word in words)
    words = [
        word if size is None else f"{name}={size}"
        for word, name, size in zip(words, named, small, strict=True)
    ]
    mark = uuid.uuid4().hex
    conditions = Conditions(environment={MARK: mark})
    ended = run_command(["main_ppo", *words, *keys], folder=tmp_path, conditions=conditions)
    assert ended.code == 0, ended.stderr
    run = tmp_path / "checkpoints/verl_async_rl_redmoe16b/run_1"
    rows = metrics_of(run)
    assert list(rows) == [0, 1, 2, 3]
    assert rows[3]["training/lag/max"] <= 1
    assert rows[3]["rollout/engine/num_decoded_tokens"] > 0
    rollout = json.loads((run / "config.json").read_text())["actor_rollout_ref"]["rollout"]
    assert rollout["name"] == SGLANG
    assert none_left(mark)
