# SPDX-License-Identifier: Apache-2.0
"""Every recipe of examples/ trains in a tiny form.

A recipe's own keys stay, but for models, data, sizes and devices.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.commands import run_command
from tests.fakes.seeing_files import write_policy, write_rows
from tests.fakes.tiny_run import REWARDS, Material, metrics_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDERS = ("ascend", "verl")
PROCESSES = ("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1")


def recipes(command: str) -> list[Path]:
    """Return the recipes of a command."""
    found = [path for folder in FOLDERS for path in sorted((EXAMPLES / folder).glob("*.yaml"))]
    return [path for path in found if path.name.startswith("sft_") == (command == "sft")]


def tiny_training(material: Material, run: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={material.policy}",
        f"data.train_files={material.train}",
        f"data.val_files={material.test}",
        "data.train_batch_size=4",
        "data.gen_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={REWARDS}",
        "custom_reward_function.name=graded",
        "algorithm.filter_groups.metric=score",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        *PROCESSES,
    ]


def tiny_tuning(recipe: Path, material: Material, run: Path) -> list[str]:
    has_turns = "multiturn" in recipe.read_text("utf-8")
    rows = material.conversations if has_turns else material.demonstrations
    return [
        f"model.path={material.policy}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=8",
        "data.max_length=128",
        "engine.ulysses_sequence_parallel_size=1",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=1",
        *PROCESSES,
    ]


@pytest.mark.parametrize("recipe", recipes("train"), ids=lambda path: path.stem)
def test_a_recipe_of_reinforcement_trains(recipe: Path, material: Material, tmp_path: Path) -> None:
    arguments = ["train", str(recipe), *tiny_training(material, tmp_path / "run")]
    if recipe.stem.startswith("ppo_"):
        arguments.append(f"critic.model.path={material.policy}")
    if "_vl_" in recipe.stem:
        rows = write_rows(tmp_path / "rows.parquet", 8)
        arguments.append(f"actor_rollout_ref.model.path={write_policy(tmp_path / 'seeing')}")
        arguments += [f"data.train_files={rows}", f"data.val_files={rows}"]
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert metrics_of(tmp_path / "run")[1]["training/global_step"] == 1


@pytest.mark.parametrize("recipe", recipes("sft"), ids=lambda path: path.stem)
def test_a_recipe_of_fine_tuning_trains(recipe: Path, material: Material, tmp_path: Path) -> None:
    ended = run_command(
        ["sft", str(recipe), *tiny_tuning(recipe, material, tmp_path / "run")], folder=tmp_path
    )
    assert ended.code == 0, ended.stderr
    assert metrics_of(tmp_path / "run")[1]["train/loss"] > 0
