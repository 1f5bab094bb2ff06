# SPDX-License-Identifier: Apache-2.0
"""L14: published commands that train adapters, and ReTool's fine-tuning, are planned as they are.

The tiny forms of these commands train in tests/e2e/test_lora_commands.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.cli.entries import spelled_out
from tandem.cli.plan import parse
from tandem.errors import UserError
from tests.fakes.lora_commands import LORA_COMMANDS, lora_words
from tests.unit.config.test_adapters import SAVED, write_adapter

HAS_ROWS = ("data/gsm8k/train", "data/gsm8k/test", "ReTool-SFT/train")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with rows of the commands' data, and an adapter."""
    folder = tmp_path_factory.mktemp("home")
    for name in HAS_ROWS:
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": [""] * 2048}), path)
    write_adapter(folder / "adapter", SAVED)
    return folder


def planned(name: str, home: Path) -> dict[str, Any]:
    """Return what ``tandem plan --elsewhere COMMAND`` finds, with the command word for word."""
    words = spelled_out(["plan", "--elsewhere", *lora_words(name, home)])
    return json.loads(json.dumps(parse(words[1:]).plan.to_dict()))


@pytest.mark.parametrize("name", LORA_COMMANDS)
def test_l14_a_published_command_is_planned(name: str, home: Path) -> None:
    """L14: word for word, without a refused or an unknown key."""
    plan = planned(name, home)
    assert not plan["refusals"] and not plan["unknown_keys"]
    devices = 2 if name == "run_qwen3_8b_fsdp" else 8
    assert [pool["devices"] for pool in plan["pools"]] == [devices]
    without_effect = " ".join(plan["keys_without_effect"])
    assert "lora_rank" not in without_effect and "lora_alpha" not in without_effect


@pytest.mark.parametrize(
    ("name", "rank", "alpha"),
    [
        ("run_qwen3_8b_fsdp", 64, 32),
        ("run_qwen3_8b_merge_fsdp", 32, 64),
        ("run_qwen2_5_vl_7b_fsdp", 64, 32),
        ("sft_peft_2025", 32, 16),
        ("sft_peft_2026", 32, 16),
        ("retool_sft_2026", 0, 16),
    ],
)
def test_l14_the_adapters_are_those_of_the_command(
    name: str, rank: int, alpha: int, home: Path
) -> None:
    """L14: rank and alpha have the meaning that they have in verl."""
    config = planned(name, home)["config"]
    model = config["actor_rollout_ref"]["model"] if "actor_rollout_ref" in config else None
    model = model or config["model"]
    assert (model["lora_rank"], model["lora_alpha"]) == (rank, alpha)


def test_l14_merging_has_no_effect_and_an_adapter_is_read(home: Path, tmp_path: Path) -> None:
    """L14: the scripts with merged weights and with a saved adapter."""
    merged = planned("run_qwen3_8b_merge_fsdp", home)["keys_without_effect"]
    assert "apart" in merged["actor_rollout_ref.model.lora.merge"]
    with pytest.raises(UserError, match=r"lora_adapter_path='.*adapter': no such folder"):
        planned("run_qwen3_8b_from_adapter_fsdp", tmp_path)
    shutil.copytree(home / "adapter", tmp_path / "adapter")
    assert not planned("run_qwen3_8b_from_adapter_fsdp", tmp_path)["refusals"]


def test_l14_both_forms_of_sft_peft_train_alike(home: Path) -> None:
    """L14: the forms of 2025 and 2026 mean the same."""
    old, new = (planned(f"sft_peft_{year}", home) for year in (2025, 2026))
    assert old["config"]["engine"]["ulysses_sequence_parallel_size"] == 2
    assert new["config"]["engine"]["ulysses_sequence_parallel_size"] == 2
    assert old["config"]["data"]["response_dict_keys"] == ["answer"]
    assert new["config"]["data"]["multiturn"]["enable"]
    assert old["total_training_steps"] == new["total_training_steps"] == 2 * 2048 // 256
