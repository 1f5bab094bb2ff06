# SPDX-License-Identifier: Apache-2.0
"""A tiny model that sees trains with GRPO on pictures, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tandem.cli.entries import spelled_out
from tandem.cli.main import main
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.data.files import write_parquet
from tandem.driver import sft, train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.errors import UserError
from tests.fakes.seeing_commands import demonstration_words, geo3k_arguments
from tests.fakes.seeing_files import RUN_KEYS, png, write_policy, write_rows


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    root = tmp_path_factory.mktemp("seeing")
    return SimpleNamespace(
        root=root,
        policy=write_policy(root / "model"),
        qwen3=write_policy(root / "qwen3", "qwen3_vl"),
        rows=write_rows(root / "rows.parquet", 12),
    )


def settings(files: Any, folder: Path, *words: str) -> RunConfig:
    keys = (
        f"actor_rollout_ref.model.path={files.policy}",
        f"data.train_files={files.rows}",
        f"data.val_files={files.rows}",
        f"trainer.default_local_dir={folder}",
        *RUN_KEYS,
        "trainer.save_freq=1",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=2",
    )
    return load_config(RunConfig, [*keys, *words]).config


def run(config: RunConfig) -> dict[str, torch.Tensor]:
    """Train, and return the weights of the last checkpoint."""
    torch.set_num_threads(1)
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
    folder = config.trainer.run_folder / f"global_step_{config.trainer.total_training_steps}"
    (file,) = (folder / "actor").glob("*model.safetensors")
    return load_file(file)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_VL13_a_run_and_its_resumption_end_with_the_same_bits(files: Any, tmp_path: Path) -> None:  # noqa: N802
    """VL13: the tower is trained too."""
    whole = run(settings(files, tmp_path / "whole"))
    first = settings(files, tmp_path / "parts", "trainer.total_training_steps=1")
    run(first)
    again = run(settings(files, tmp_path / "parts", "trainer.resume_mode=auto"))
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    start = load_file(files.policy / "model.safetensors")
    moved = [name for name in whole if not torch.equal(whole[name], start[name])]
    assert any(name.startswith("visual.blocks") for name in moved)
    lines = metrics_of(tmp_path / "whole")
    difference = max(
        line[name] for line in lines for name in line if name.endswith("rollout_probs_diff_max")
    )
    assert difference < 1e-5


@pytest.mark.parametrize("family", ["policy", "qwen3"])
def test_VL10_a_frozen_tower_stays_as_it_is(family: str, files: Any, tmp_path: Path) -> None:  # noqa: N802
    """VL10: bit for bit, while the decoder is trained."""
    frozen = "actor_rollout_ref.actor.freeze_vision_tower=True"
    model = getattr(files, family)
    path = f"actor_rollout_ref.model.path={model}"
    one = "trainer.total_training_steps=1"
    trained = run(settings(files, tmp_path, frozen, path, one))
    start = load_file(model / "model.safetensors")
    kept = {name for name in trained if torch.equal(trained[name], start[name])}
    assert {name for name in start if "visual." in name} <= kept
    assert not any(name.endswith("down_proj.weight") and "layers" in name for name in kept)
    with pytest.raises(
        UserError, match="freeze_vision_tower: .*global_step_1 was trained with True"
    ):
        run(settings(files, tmp_path, path, "trainer.resume_mode=auto"))


REFUSED = {
    "actor_rollout_ref.model.target_modules='.*visual.*'": "no linear map of the model's 2 layers",
    "actor_rollout_ref.rollout.name=hf": "only the native engine reads pictures",
    "data.mm_processor_kwargs.max_pixels=10": "must not be below min_pixels .64., or below one",
}


def test_other_models_are_refused_even_if_they_read_text(files: Any, tmp_path: Path) -> None:
    critic = ("algorithm.adv_estimator=gae", "critic.model.path=text")
    with pytest.raises(UserError, match="critic.model.path='text': critics do not see, and the p"):
        train.prepare(settings(files, tmp_path, *critic))
    with pytest.raises(UserError, match="reward_model.enable=True: reward models do not see"):
        train.prepare(settings(files, tmp_path, "reward_model.enable=True"))


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_built_is_refused_in_one_line(key: str, files: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REFUSED[key]) as caught:
        train.prepare(settings(files, tmp_path, "actor_rollout_ref.model.lora_rank=8", key))
    assert "\n" not in str(caught.value)


def test_adapters_of_the_text_are_trained_and_saved_alone(files: Any, tmp_path: Path) -> None:
    """A run that resumes from them computes a reference without a second copy of the base."""
    rank = "actor_rollout_ref.model.lora_rank=4"
    whole = run(settings(files, tmp_path / "whole", rank))
    run(settings(files, tmp_path / "parts", rank, "trainer.total_training_steps=1"))
    again = run(settings(files, tmp_path / "parts", rank, "trainer.resume_mode=auto"))
    assert whole.keys() == again.keys()
    assert all(".language_model.layers." in name and "lora" in name for name in whole)
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    steps = [line for line in metrics_of(tmp_path / "whole") if "actor/kl_loss" in line]
    assert all(line["training/rollout_probs_diff_max"] < 1e-5 for line in steps)
    assert steps[-1]["actor/kl_loss"] > 0
    saved = tmp_path / f"whole/global_step_{len(steps)}/actor"
    start = f"actor_rollout_ref.model.lora_adapter_path={saved}"
    further = run(settings(files, tmp_path / "further", rank, start))
    assert further.keys() == whole.keys()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_verls_scripts_of_geo3k_train_in_a_tiny_form(
    family: str, files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only sizes, files and devices change; the program is that of the same module."""
    small = (
        f"actor_rollout_ref.model.path={files.policy if family == 'qwen2_5_vl' else files.qwen3}",
        f"data.train_files={files.rows}",
        f"data.val_files={files.rows}",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "custom_reward_function.path=pkg://tests.fakes.rewards",
        "custom_reward_function.name=graded",
        f"trainer.default_local_dir={tmp_path}",
        "trainer.total_training_steps=1",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
    )
    words = ("--config-name=ppo_trainer", *geo3k_arguments(family, home=str(tmp_path)))
    assert main(["train", *words, *small]) == 0
    assert "tandem's native engine generates" in capsys.readouterr().err
    (step,) = [line for line in metrics_of(tmp_path) if "actor/kl_loss" in line]
    assert step["training/rollout_probs_diff_max"] < 1e-5


def conversations(count: int) -> list[dict[str, Any]]:
    """Return rows with pictures in several turns, as verl's rows for fine-tuning have them."""
    turns = [
        {"role": "user", "content": "<image>how many?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "and <image>here?"},
        {"role": "assistant", "content": "12"},
    ]
    return [
        {"messages": turns, "images": [{"bytes": png(seed=i)}, {"bytes": png(16, 8, seed=i)}]}
        for i in range(count)
    ]


def test_VL14_verls_script_of_demonstrations_trains_in_a_tiny_form(  # noqa: N802
    files: Any, tmp_path: Path
) -> None:
    """VL14: all keys of ``run_qwen3_vl_2b_fsdp.sh``; files, sizes and devices are others."""
    write_parquet(conversations(8), tmp_path / "rows.parquet", key="test")
    replaced = ("trainer.n_gpus_per_node=", "engine.ulysses_sequence_parallel_size=")
    words = spelled_out(["plan", *demonstration_words(home=str(tmp_path))])[1:]
    small = (
        f"model.path={files.qwen3}",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.train_batch_size=4",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_training_steps=2",
        "trainer.logger=[console]",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
    )
    assert main([*(word for word in words if not word.startswith(replaced)), *small]) == 0
    losses = [line["train/loss"] for line in metrics_of(tmp_path / "run") if "train/loss" in line]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    trained = load_file(tmp_path / "run/global_step_2/actor/model.safetensors")
    start = load_file(files.qwen3 / "model.safetensors")
    moved = {name for name in start if not torch.equal(start[name], trained[name])}
    assert any("visual.blocks" in name for name in moved)
    assert any("language_model.layers" in name for name in moved)


def test_VL14_demonstrations_with_pictures_are_learned(files: Any, tmp_path: Path) -> None:  # noqa: N802
    """VL14: the loss falls, and pictures carry none."""
    write_parquet(conversations(8), tmp_path / "rows.parquet", key="test")
    keys = (
        f"model.path={files.policy}",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.multiturn.enable=True",
        "data.train_batch_size=4",
        "data.max_length=128",
        "engine.dtype=float32",
        "optim.lr=0.003",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        "trainer.logger=[]",
    )
    config = load_config(SftConfig, keys).config
    prepared = sft.prepare(config)
    (sequence, *_) = prepared.source.draw(1)
    assert [picture.num_tokens for picture in sequence.pictures] == [9, 2]
    mask, ids = sequence.loss_mask, sequence.response_ids
    assert mask is not None and len(mask) == len(ids)
    assert not any(drawn for drawn, token in zip(mask, ids, strict=True) if token >= 512)
    ended = run_prepared(local_site(config), sft.prepare(config))
    assert ended.exit_code == 0
    first, last = (line["train/loss"] for line in metrics_of(tmp_path / "run")[-2:])
    assert last < first
