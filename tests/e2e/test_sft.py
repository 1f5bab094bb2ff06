# SPDX-License-Identifier: Apache-2.0
"""``tandem sft`` end to end: it learns, validates, saves, resumes and exports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.commands import TIMEOUT_S, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, sft_arguments

STEPS = range(1, 7)


@pytest.fixture(scope="module")
def sft_run(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of six steps."""
    folder = tmp_path_factory.mktemp("sft")
    schedule = ("trainer.save_freq=3", "trainer.test_freq=3", "trainer.val_before_train=True")
    ended = run_command(sft_arguments(material, folder / "run", *schedule), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


def test_loss_falls_in_training_and_validation(sft_run: Path) -> None:
    metrics = metrics_of(sft_run)
    assert list(metrics) == [0, *STEPS]
    assert metrics[6]["train/loss"] < 0.8 * metrics[1]["train/loss"]
    assert metrics[0]["val/loss"] > metrics[3]["val/loss"] > metrics[6]["val/loss"]
    assert "val/loss" not in metrics[2]


def test_metrics_have_verls_names(sft_run: Path) -> None:
    row = metrics_of(sft_run)[6]
    names = {"train/loss", "train/lr", "train/grad_norm", "train/global_tokens"}
    assert not (names | {"perf/throughput", "training/epoch"}) - row.keys()
    assert row["train/lr"] < metrics_of(sft_run)[2]["train/lr"]


def test_resuming_from_the_middle_gives_the_same_run(
    sft_run: Path, material: Material, tmp_path: Path
) -> None:
    keys = ("trainer.resume_mode=resume_path", "trainer.test_freq=3", "trainer.save_freq=3")
    path = f"trainer.resume_from_path={sft_run}/global_step_3"
    ended = run_command(sft_arguments(material, tmp_path / "run", *keys, path), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    resumed, whole = (repeatable(metrics_of(run)) for run in (tmp_path / "run", sft_run))
    assert {step: resumed[step] for step in (4, 5, 6)} == {s: whole[s] for s in (4, 5, 6)}
    for name in ("actor/model.safetensors", "actor/optimizer.pt", "pipeline.json"):
        ours, theirs = (run / "global_step_6" / name for run in (tmp_path / "run", sft_run))
        assert ours.read_bytes() == theirs.read_bytes()


def test_trained_model_is_what_grpo_can_start_from(sft_run: Path, tmp_path: Path) -> None:
    arguments = ["export", str(sft_run), "--output", str(tmp_path / "model"), "--step", "6"]
    assert run_command(arguments, folder=tmp_path).code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert torch.isfinite(model(torch.arange(3, 20)[None]).logits).all()
    assert (tmp_path / "model/tokenizer.json").is_file()


def test_conversations_train(material: Material, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "And 4 more?"},
        {"role": "assistant", "content": "9"},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": turns}] * 8), tmp_path / "talk.parquet")
    keys = (f"data.train_files={tmp_path}/talk.parquet", "data.multiturn.enable=True")
    rest = ("data.val_files=[]", "trainer.total_epochs=3")
    ended = run_command(sft_arguments(material, tmp_path / "run", *keys, *rest), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    metrics = metrics_of(tmp_path / "run")
    assert list(metrics) == [1, 2, 3]
    assert metrics[3]["train/loss"] < metrics[1]["train/loss"]


def test_verls_entry_module_runs(material: Material, tmp_path: Path) -> None:
    arguments = sft_arguments(material, tmp_path / "run", "trainer.total_training_steps=1")
    command = [sys.executable, "-m", "tandem.trainer.fsdp_sft_trainer", *arguments[1:]]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert list(metrics_of(tmp_path / "run")) == [1]
