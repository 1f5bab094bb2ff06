# SPDX-License-Identifier: Apache-2.0
"""Runs with adapters (LoRA) in one process: L5, L6, L9 and L15, and PPO, DAPO and SFT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.models.adapters import BASE_FILE
from tests.fakes import learnable
from tests.fakes.commands import check_refusal, run_command
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    sft_arguments,
    train_arguments,
)

MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=16", "data.val_files=[]")
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1")
LEARNABLE = Path(learnable.__file__)
ACTOR = "global_step_4/actor"
ADAPTER = "adapter_model.safetensors"
LOGP_DIFF = "training/rollout_logp_diff_max"


def train(material: Material, run: Path, *overrides: str) -> dict[int, dict[str, float]]:
    """Return the metrics of a run that must end well."""
    ended = run_command(train_arguments(material, run, *overrides), folder=run.parent)
    assert ended.code == 0, ended.stderr
    return metrics_of(run)


@pytest.fixture(scope="module")
def whole(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with adapters and a reference, saved at steps 2 and 4."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    train(material, run, *LORA, *KL, "trainer.save_freq=2")
    return run


def test_l9_a_resumed_run_is_the_same_bit_by_bit(
    material: Material, whole: Path, tmp_path: Path
) -> None:
    """L9: metrics and adapters are those of a run that was not stopped."""
    keys = (*LORA, *KL, "trainer.save_freq=2")
    train(material, tmp_path / "run", *keys, "trainer.total_training_steps=2")
    train(material, tmp_path / "run", *keys)
    assert repeatable(metrics_of(tmp_path / "run")) == repeatable(metrics_of(whole))
    one, other = (load_file(run / ACTOR / ADAPTER) for run in (whole, tmp_path / "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_l15_a_checkpoint_has_no_base(whole: Path, material: Material) -> None:
    """L15: it has the path of the base, and fewer than 4 x 18 bytes for each parameter."""
    actor = whole / ACTOR
    tensors = load_file(actor / ADAPTER)
    assert all(".lora_" in name for name in tensors)
    assert not (actor / "model.safetensors").exists()
    number = sum(tensor.numel() for tensor in tensors.values())
    tokenizer = sum(file.stat().st_size for file in actor.glob("tokenizer*"))
    size = sum(file.stat().st_size for file in actor.iterdir()) - tokenizer
    assert size < 4 * 18 * number
    assert json.loads((actor / BASE_FILE).read_text())["path"] == str(material.policy.resolve())


def test_l5_before_the_first_update_rollouts_are_those_of_all_weights(
    material: Material, whole: Path, tmp_path: Path
) -> None:
    """L5: a new adapter changes no token, because B is zero."""
    full = train(material, tmp_path / "run", "data.val_files=[]", "trainer.total_training_steps=1")
    texts = [
        [(row["prompt"], row["response"]) for row in read_lines(run / "rollouts.jsonl")]
        for run in (whole, tmp_path / "run")
    ]
    assert texts[1] and texts[0][: len(texts[1])] == texts[1]
    first, reference = metrics_of(whole)[1], metrics_of(whole)
    assert first["critic/score/mean"] == full[1]["critic/score/mean"]
    assert reference[1]["actor/kl_loss"] == 0 < reference[4]["actor/kl_loss"]


def test_a_run_continues_an_adapter_and_its_reference_is_that_policy(
    material: Material, whole: Path, tmp_path: Path
) -> None:
    start = f"{MODEL}.lora_adapter_path={whole / ACTOR}"
    rows = train(material, tmp_path / "run", start, *KL, "data.val_files=[]")
    assert rows[1]["actor/kl_loss"] == 0 < rows[4]["actor/kl_loss"]
    begun, ended = (load_file(run / ACTOR / ADAPTER) for run in (whole, tmp_path / "run"))
    assert begun.keys() == ended.keys()
    assert any(not torch.equal(begun[name], ended[name]) for name in begun)


# fp32 differs by the order of sums only. In bf16 all weights are the measure.
def test_l6_generation_and_training_compute_the_same_policy(
    material: Material, tmp_path: Path
) -> None:
    """L6: over 20 steps, fp32 to 1e-5, and bf16 as well as with all weights."""
    # With two optimizer steps a batch, the trainer scores the batch itself.
    steps = (
        "trainer.total_training_steps=20",
        "data.val_files=[]",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    )
    half = "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16"
    exact = train(material, tmp_path / "exact", *LORA, *steps)
    assert max(row[LOGP_DIFF] for row in exact.values()) <= 1e-5
    mean = "training/rollout_probs_diff_mean"
    adapted = train(material, tmp_path / "adapted", *LORA, *steps, half)
    full = train(material, tmp_path / "full", *steps, half)
    differences = [sum(row[mean] for row in rows.values()) for rows in (adapted, full)]
    assert differences[0] <= 1.1 * differences[1]


@pytest.mark.parametrize(
    "keys",
    [
        ("algorithm.adv_estimator=gae",),
        (
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.metric=score",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
        ),
    ],
    ids=["ppo", "dapo"],
)
def test_ppo_and_dapo_train_adapters(
    material: Material, tmp_path: Path, keys: tuple[str, ...]
) -> None:
    steps = ("trainer.total_training_steps=2", "trainer.save_freq=2")
    train(material, tmp_path / "run", *LORA, *keys, *steps)
    tensors = load_file(tmp_path / "run/global_step_2/actor" / ADAPTER)
    assert any(x.any() for name, x in tensors.items() if "lora_B" in name)


def test_l11_reward_teaches_adapters_alone(material: Material, tmp_path: Path) -> None:
    """L11: a short form. The best answer is a row of sevens; the checkpoint has no base."""
    keys = (
        f"{MODEL}.lora_rank=8",
        f"{MODEL}.lora_alpha=32",
        f"custom_reward_function.path={LEARNABLE}",
        "custom_reward_function.name=sevens",
        "trainer.total_training_steps=40",
        "trainer.test_freq=40",
        "trainer.val_before_train=True",
    )
    rows = train(material, tmp_path / "run", *keys)
    (name,) = (name for name in rows[0] if name.startswith("val-core/"))
    assert rows[0][name] < 0.2 and rows[40][name] >= 0.9, rows[40]
    files = {file.name for file in (tmp_path / "run/global_step_40/actor").iterdir()}
    assert ADAPTER in files and "model.safetensors" not in files


def test_supervised_fine_tuning_lowers_the_loss(material: Material, tmp_path: Path) -> None:
    keys = ("model.lora_rank=8", "trainer.total_training_steps=12", "optim.lr=0.03")
    ended = run_command(sft_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    rows = metrics_of(tmp_path / "run")
    assert rows[12]["train/loss"] < rows[1]["train/loss"] - 0.1


def test_a_changed_start_is_refused(material: Material, whole: Path, tmp_path: Path) -> None:
    other = train_arguments(material, whole, "data.val_files=[]", *KL)
    check_refusal(
        run_command(other, folder=tmp_path), "has adapters, and all weights would be trained"
    )
    path = f"{MODEL}.lora_adapter_path={material.policy}"
    new = train_arguments(material, tmp_path / "run", path)
    check_refusal(run_command(new, folder=tmp_path), "no adapter_config.json")
