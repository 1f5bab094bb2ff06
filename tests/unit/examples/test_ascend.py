# SPDX-License-Identifier: Apache-2.0
"""A19: every row of Ascend's tables is one recipe; on other hardware one key is another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.cli.plan import plan_arguments, plan_sft_arguments
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

FOLDER = Path(__file__).resolve().parents[3] / "examples/ascend"
DEVICES = FOLDER.parent / "devices"
OVERLAYS = ("npu", "cuda")
DEVICE_KEYS = {"trainer.device"}

# recipe: (model, nodes, devices a node, prompts a step, prompts an update, samples a prompt)
RUNS = {
    "grpo_qwen2_5_7b": ("Qwen/Qwen2.5-7B-Instruct", 1, 16, 1024, 32, 5),
    "grpo_qwen2_5_32b": ("Qwen/Qwen2.5-32B-Instruct", 2, 16, 1024, 128, 5),
    "grpo_qwen2_5_vl_3b": ("Qwen/Qwen2.5-VL-3B-Instruct", 1, 8, 512, 16, 5),
    "grpo_qwen2_5_vl_7b": ("Qwen/Qwen2.5-VL-7B-Instruct", 1, 16, 512, 32, 5),
    "grpo_qwen2_5_vl_32b": ("Qwen/Qwen2.5-VL-32B-Instruct", 2, 16, 512, 32, 5),
    "dapo_qwen2_5_7b": ("Qwen/Qwen2.5-7B-Instruct", 1, 16, 16, 1, 16),
    "dapo_qwen2_5_32b": ("Qwen/Qwen2.5-32B", 2, 16, 128, 32, 16),
    "dapo_qwen3_8b_base": ("Qwen/Qwen3-8B-Base", 1, 8, 16, 1, 16),
    "dapo_qwen3_14b_base": ("Qwen/Qwen3-14B-Base", 2, 16, 16, 1, 16),
    "dapo_qwen3_30b_a3b_base": ("Qwen/Qwen3-30B-A3B-Base", 8, 16, 512, 32, 16),
}
# recipe: (model, sequence parallelism, epochs)
FINE_TUNES = {
    "sft_qwen3_8b_peft": ("Qwen/Qwen3-8B", 2, 2),
    "sft_retool_qwen2_5_7b": ("Qwen/Qwen2.5-7B-Instruct", 4, 6),
}


def paths(recipe: str, overlay: str) -> list[str]:
    return [str(FOLDER / f"{recipe}.yaml"), str(DEVICES / f"{overlay}.yaml")]


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """All keys of a configuration with their values."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        below = flat(value, f"{above}{name}.") if isinstance(value, dict) else None
        found |= {f"{above}{name}": value} if below is None else below
    return found


def differing(ours: LoadedConfig[Any], theirs: LoadedConfig[Any]) -> set[str]:
    left, right = (flat(one.config.model_dump()) for one in (ours, theirs))
    return {name for name in left | right if left.get(name) != right.get(name)}


def test_a19_every_row_has_a_recipe() -> None:
    files = {path.stem for path in FOLDER.glob("*.yaml")}
    assert files == RUNS.keys() | FINE_TUNES.keys()
    assert {path.stem for path in DEVICES.glob("*.yaml")} == set(OVERLAYS)


@pytest.mark.parametrize(("recipe", "row"), RUNS.items())
def test_a19_a_recipe_has_the_rows_settings_and_differs_in_device_keys_only(
    recipe: str, row: tuple[Any, ...]
) -> None:
    npu, cuda = (load_config(RunConfig, paths(recipe, overlay)) for overlay in OVERLAYS)
    config = npu.config
    roles, trainer = config.actor_rollout_ref, config.trainer
    assert row == (
        roles.model.path,
        trainer.nnodes,
        trainer.n_gpus_per_node,
        config.data.train_batch_size,
        roles.actor.ppo_mini_batch_size,
        roles.rollout.n,
    )
    assert trainer.device == "npu" and npu.unknown_keys == ()
    assert differing(npu, cuda) == DEVICE_KEYS
    plan = plan_arguments([*paths(recipe, "npu"), "trainer.device=npu"])
    assert plan.to_dict()["config"]["trainer"]["device"] == "npu"


@pytest.mark.parametrize(("recipe", "row"), FINE_TUNES.items())
def test_a19_a_recipe_of_fine_tuning_has_the_rows_settings(
    recipe: str, row: tuple[Any, ...]
) -> None:
    npu, cuda = (load_config(SftConfig, paths(recipe, overlay)) for overlay in OVERLAYS)
    config = npu.config
    found = (
        config.model.path,
        config.engine.ulysses_sequence_parallel_size,
        config.trainer.total_epochs,
    )
    assert found == row and config.trainer.device == "npu" and npu.unknown_keys == ()
    assert differing(npu, cuda) == DEVICE_KEYS
    assert plan_sft_arguments(paths(recipe, "npu")).to_dict()
