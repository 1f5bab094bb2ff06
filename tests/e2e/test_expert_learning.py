# SPDX-License-Identifier: Apache-2.0
"""MO22: the quickstart's mixture of experts learns, with routing replay R3 and without.

Both runs start from one model that demonstrations trained, and take the first 40 of the
quickstart's 140 steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart.command import warm_start
from tandem.quickstart.materials import Materials, prepare
from tests.fakes.calculator_run import GRPO
from tests.fakes.tiny_run import metrics_of

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
NUM_STEPS = 40
R3 = (
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Materials, Path]:
    """Return the files, and the model after the demonstrations."""
    folder = tmp_path_factory.mktemp("learning")
    materials = prepare(folder / "materials", seed=0, with_experts=True)
    return materials, warm_start(materials, folder / "sft", seed=0, keys=["trainer.device=cpu"])


@pytest.mark.deep
@pytest.mark.parametrize("replay", [(), R3], ids=["plain", "R3"])
def test_mo22_a_small_mixture_learns(
    replay: tuple[str, ...], warm: tuple[Materials, Path], tmp_path: Path
) -> None:
    materials, model = warm
    arguments = (
        GRPO,
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        f"trainer.default_local_dir={tmp_path}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *replay,
    )
    config = load_config(RunConfig, list(arguments)).config
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
    rows = metrics_of(tmp_path)
    assert rows[0][ACCURACY] < 0.4
    assert rows[NUM_STEPS][ACCURACY] >= 0.9
    assert rows[NUM_STEPS]["actor/experts/max_over_mean"] <= 4
    assert ("actor/router/replay_overlap" in rows[NUM_STEPS]) == bool(replay)
