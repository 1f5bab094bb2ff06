# SPDX-License-Identifier: Apache-2.0
"""L14: published commands that train adapters, and ReTool's fine-tuning, train in a tiny form.

All keys of a command stay, but for models, data, sizes and devices.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tandem.cli.entries import spelled_out
from tandem.config.derived.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tests.fakes.commands import run_command
from tests.fakes.lora_commands import LORA_COMMANDS, lora_words
from tests.fakes.seeing_files import write_policy, write_rows
from tests.fakes.tiny_adapters import open_adapted, spread_b
from tests.fakes.tiny_run import REWARDS, Material, metrics_of

DEVICES = ("trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.logger=[console]")
REPLACED = (
    "trainer.n_gpus_per_node=",
    "model.partial_pretrain=",
    "ulysses_sequence_parallel_size=",
)
"""Keys of which the tiny form has other spellings."""
GRPO = [name for name in LORA_COMMANDS if name.startswith("run_")]
SFT = [name for name in LORA_COMMANDS if "sft_" in name]


def command(name: str, home: Path, keys: list[str]) -> list[str]:
    """Return a command as ``tandem`` takes it, with the keys of its tiny form."""
    planned = spelled_out(["plan", *lora_words(name, home)])[1:]
    words = planned if name in SFT else ["train", *planned]
    return [word for word in words if not word.startswith(REPLACED)] + keys


@pytest.mark.parametrize("name", GRPO)
def test_l14_a_grpo_command_trains(name: str, material: Material, tmp_path: Path) -> None:
    """L14: two steps of each of verl's four scripts of GRPO."""
    model = open_adapted(material.policy)
    spread_b(model)
    (tmp_path / "adapter").mkdir()
    model.save(tmp_path / "adapter")
    run = tmp_path / "run"
    policy, train, test = material.policy, material.train, material.test
    if "_vl_" in name:
        policy = write_policy(tmp_path / "seeing")
        train = test = write_rows(tmp_path / "rows.parquet", 8)
    keys = [
        f"actor_rollout_ref.model.path={policy}",
        f"data.train_files={train}",
        f"data.val_files={test}",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={REWARDS}",
        "custom_reward_function.name=graded",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=2",
        *DEVICES,
    ]
    ended = run_command(command(name, tmp_path, keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert list(metrics_of(run)) == ([1, 2] if name == "run_qwen3_8b_fsdp" else [0, 1, 2])
    assert_adapter_trained(run / "global_step_2/actor")


@pytest.mark.parametrize("name", SFT)
def test_l14_a_command_of_fine_tuning_trains(name: str, material: Material, tmp_path: Path) -> None:
    """L14: two steps of SFT-PEFT and ReTool-SFT in both forms."""
    rows = material.conversations
    if name == "sft_peft_2025":
        rows = _as_gsm8k(material.demonstrations, tmp_path / "gsm8k.parquet")
    elif name.startswith("retool"):
        rows = _with_tools(material.conversations, tmp_path / "tools.parquet")
    run = tmp_path / "run"
    keys = [
        f"model.path={material.policy}",
        f"data.train_files={rows}",
        f"data.val_files={rows}",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=8",
        "data.max_length=256",
        "engine.ulysses_sequence_parallel_size=1",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=2",
        *DEVICES,
    ]
    ended = run_command(command(name, tmp_path, keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert all(metrics_of(run)[step]["train/loss"] > 0 for step in (1, 2))
    if name.startswith("sft_peft"):
        assert_adapter_trained(run / "global_step_2/actor")
    else:
        assert not list(run.rglob(ADAPTER_CONFIG))


def _as_gsm8k(demonstrations: Path, path: Path) -> Path:
    """Write the rows as verl's preprocessing of GSM8K does: both texts are in ``extra_info``."""
    table = pq.read_table(demonstrations)
    pq.write_table(table.from_pylist([{"extra_info": row} for row in table.to_pylist()]), path)
    return path


def _with_tools(conversations: Path, path: Path) -> Path:
    """Write the rows with a column of tools, as ReTool's preprocessing does."""
    parameters = {"type": "object", "properties": {"code": {"type": "string"}}}
    tool = {
        "type": "function",
        "function": {"name": "code_interpreter", "description": "", "parameters": parameters},
    }
    table = pq.read_table(conversations)
    rows = [row | {"tools": [tool]} for row in table.to_pylist()]
    pq.write_table(table.from_pylist(rows), path)
    return path


def assert_adapter_trained(folder: Path) -> None:
    """Check that B, which is zero in a new adapter, has changed, and that there is no base."""
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    assert any(x.any() for name, x in tensors.items() if "lora_B" in name)
    assert not (folder / "model.safetensors").exists()
