# SPDX-License-Identifier: Apache-2.0
"""Runs of several processes that divide experts: both strategies compute the same (MO16), and a run
that was killed goes on as if it had not been (MO13).
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.commands import Command, Conditions, run_command
from tests.fakes.tiny_experts import write_tiny_qwen3_moe
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
NUM_STEPS = 6
MAX_ATTEMPTS = 5
SIZES = (
    "trainer.n_gpus_per_node=4",
    *(f"{role}.{{section}}.tensor_model_parallel_size=2" for role in (ACTOR, REF)),
    *(f"{role}.{{section}}.expert_model_parallel_size=2" for role in (ACTOR, REF)),
    *(f"{role}.{{section}}.{{sequence}}=2" for role in (ACTOR, REF)),
)
"""Tensor, sequence and expert parallelism of two each, in the words of a strategy."""
DIVIDED = (
    "trainer.n_gpus_per_node=2",
    f"{ACTOR}.fsdp_config.expert_model_parallel_size=2",
    "actor_rollout_ref.rollout.expert_parallel_size=2",
)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The folder of a tiny model with experts, whose heads four ranks can divide."""
    return write_tiny_qwen3_moe(tmp_path / "policy", num_heads=4, num_kv_heads=2)


def command(material: Material, run: Path, policy: Path, *, keys: Sequence[str]) -> list[str]:
    """Return the arguments of a run of a few steps with two optimizer steps and KL each."""
    return train_arguments(
        material,
        run,
        f"actor_rollout_ref.model.path={policy}",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.use_kl_loss=True",
        "data.val_files=[]",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=1",
        *keys,
    )


def same_run(run: Path, other: Path, *, step: int = NUM_STEPS) -> bool:
    """Return whether metrics, rollouts, weights and moments of two runs are the same bit by bit.

    Args:
        step: the last one.
    """
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(other))
    assert (run / "rollouts.jsonl").read_bytes() == (other / "rollouts.jsonl").read_bytes()
    ours, theirs = (
        {
            path.relative_to(folder): path.read_bytes()
            for pattern in ("*.safetensors", "*.pt", "*.distcp")
            for path in (folder / f"global_step_{step}" / "actor").rglob(pattern)
        }
        for folder in (run, other)
    )
    assert ours and ours.keys() == theirs.keys()
    return ours == theirs


def test_mo16_both_strategies_with_equal_sizes_compute_the_same(
    material: Material, policy: Path, cluster: Conditions, tmp_path: Path
) -> None:
    words = {
        "fsdp": {"section": "fsdp_config", "sequence": "ulysses_sequence_parallel_size"},
        "megatron": {"section": "megatron", "sequence": "context_parallel_size"},
    }
    for strategy, names in words.items():
        keys = [f"{ACTOR}.strategy={strategy}", *(size.format(**names) for size in SIZES)]
        keys += ["trainer.total_training_steps=2", "trainer.save_freq=2"]
        arguments = command(material, tmp_path / strategy, policy, keys=keys)
        folder = tmp_path / f"{strategy} output"
        ended = run_command(arguments, folder=folder, conditions=cluster)
        assert ended.code == 0, ended.stderr
    assert same_run(tmp_path / "megatron", tmp_path / "fsdp", step=2)


def test_mo13_a_killed_run_with_divided_experts_goes_on_as_if_it_had_not_been(
    material: Material, policy: Path, cluster: Conditions, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    arguments = command(material, whole, policy, keys=DIVIDED)
    ended = run_command(arguments, folder=tmp_path / "output", conditions=cluster)
    assert ended.code == 0, ended.stderr
    arguments = command(material, run, policy, keys=DIVIDED)
    kill_after_a_save(arguments, run, tmp_path / "killed")
    ended = run_command(arguments, folder=tmp_path / "resumed", conditions=cluster)
    assert ended.code == 0, ended.stderr
    assert "resumed from" in ended.stderr
    assert same_run(run, whole)


def kill_after_a_save(arguments: Sequence[str], run: Path, folder: Path) -> None:
    """Start a run and kill it after its first save. Tried again if it ended before."""
    for _ in range(MAX_ATTEMPTS):
        shutil.rmtree(run, ignore_errors=True)
        started = Command(arguments, folder=folder)
        started.wait_for(run / "latest_checkpointed_iteration.txt", text="1")
        started.signal(signal.SIGKILL)
        if started.wait().code == -signal.SIGKILL:
            return
    raise AssertionError(f"the run was faster than the signal {MAX_ATTEMPTS} times")
