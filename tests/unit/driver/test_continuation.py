# SPDX-License-Identifier: Apache-2.0
"""Settings with which a run cannot go on from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.checkpoint.store import Checkpoint
from tandem.config.check.continuation import settings_json
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.continuation import require_same_experiment
from tandem.errors import UserError


def config(*overrides: str) -> RunConfig:
    return load_config(RunConfig, ["data.train_files=some", *overrides]).config


def test_a_critic_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "global_step_2"
    folder.mkdir()
    (folder / "config.json").write_text(settings_json(config()))
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}")
    with_critic = config("algorithm.adv_estimator=gae", *named)
    checkpoint = Checkpoint(folder, step=2)
    with pytest.raises(UserError) as caught:
        require_same_experiment(with_critic, checkpoint, total_steps=4)
    assert str(caught.value).startswith(
        f"algorithm.adv_estimator='gae': it needs a critic, and {folder} has none."
    )
    (folder / "critic").mkdir()
    require_same_experiment(with_critic, checkpoint, total_steps=4)
