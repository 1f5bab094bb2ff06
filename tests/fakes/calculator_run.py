# SPDX-License-Identifier: Apache-2.0
"""Tiny runs on word problems with a calculator, whose model has not learned anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart import materials as module
from tandem.quickstart.calculator import CALCULATOR
from tandem.quickstart.materials import Materials, prepare

GRPO = str(Path(module.__file__).parent / "grpo.yaml")


def write_materials(folder: Path) -> Materials:
    """Make a tokenizer, a random model and 16 rows of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NUM_DEMONSTRATIONS", "NUM_TRAIN", "NUM_TEST", "NUM_UNSEEN"):
            patch.setattr(module, name, 16)
        patch.setattr(module, "NUM_TOKENIZER_TEXTS", 200)
        return prepare(folder, seed=0, task=CALCULATOR)


def let_turns_end(model: Path) -> None:
    """Let a model that has learned nothing end a turn once in four tokens."""
    settings = model / "generation_config.json"
    known = json.loads(settings.read_text())
    known["eos_token_id"] = sorted({known["eos_token_id"], *range(40, 400, 4)})
    settings.write_text(json.dumps(known))


def configured(materials: Materials, folder: Path, *overrides: str) -> RunConfig:
    """Return a run of two steps with 4 prompts x 2 samples, in one process."""
    keys = (
        f"actor_rollout_ref.model.path={materials.model}",
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=4",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
    )
    config = load_config(RunConfig, [GRPO, *keys, *overrides]).config
    assert place_run(config).is_one_process
    return config


def train_on(config: RunConfig) -> None:
    """Run to the end."""
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
