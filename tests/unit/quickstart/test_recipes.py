# SPDX-License-Identifier: Apache-2.0
"""The recipes say only what the schema knows, and fit the materials they are run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.quickstart.materials import NUM_DEMONSTRATIONS, NUM_TRAIN
from tandem.quickstart.model import QUICKSTART_SIZE

FOLDER = Path(__file__).resolve().parents[3] / "tandem/quickstart"
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 40, 30


def recipe(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def test_sft_recipe() -> None:
    config = SftConfig.model_validate(recipe("sft.yaml"))
    steps_per_epoch = NUM_DEMONSTRATIONS // config.data.train_batch_size
    assert config.trainer.total_training_steps is not None
    assert config.trainer.total_training_steps <= steps_per_epoch * config.trainer.total_epochs
    assert config.data.max_length >= MAX_PROMPT_TOKENS + MAX_ANSWER_TOKENS
    assert (config.optim.optimizer, config.optim.muon_lr, config.optim.lr) == ("Muon", 0.02, 0.003)


def test_grpo_recipe() -> None:
    config = RunConfig.model_validate(recipe("grpo.yaml"))
    steps_per_epoch = NUM_TRAIN // config.data.train_batch_size
    assert config.trainer.total_training_steps is not None
    assert config.trainer.total_training_steps <= steps_per_epoch * config.trainer.total_epochs
    assert config.data.max_prompt_length >= MAX_PROMPT_TOKENS
    assert config.data.max_response_length > MAX_ANSWER_TOKENS
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= QUICKSTART_SIZE.max_positions
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size % actor.ppo_mini_batch_size == 0
    assert (actor.clip_low, actor.clip_high, actor.optim.lr) == (0.2, 0.28, 3e-4)
    assert config.algorithm.rollout_correction.bypass_mode


def test_recipes_name_no_paths() -> None:
    for name in ("sft.yaml", "grpo.yaml"):
        assert "path" not in yaml.safe_dump(recipe(name))
        assert "files" not in yaml.safe_dump(recipe(name))
