# SPDX-License-Identifier: Apache-2.0
"""MO22: a small mixture of experts learns by GRPO, with routing replay R3 and without.

Both runs start from one model that demonstrations trained. The short form has half of the
quickstart's kinds of questions, with smaller numbers, so that fewer demonstrations teach the
arithmetic. The deep one has the quickstart's own questions and the first 40 of its 140 steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.quickstart import materials as module
from tandem.quickstart import word_problems
from tandem.quickstart.command import warm_start
from tandem.quickstart.materials import Materials, prepare
from tandem.quickstart.word_problems import (
    TEMPLATES,
    WORD_PROBLEMS,
    correct,
    stops_early,
    takes_wrong_sign,
)
from tests.fakes.calculator_run import GRPO
from tests.fakes.tiny_run import metrics_of

ACCURACY = "val-core/openai/gsm8k/acc/mean@1"
R3 = (
    "actor_rollout_ref.actor.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
)
SHORT_WARM_UP = ("data.train_batch_size=32", "trainer.total_training_steps=400")
WRITERS = ((correct, 0.4), (stops_early, 0.5), (takes_wrong_sign, 0.1))
"""The writers of the short form's demonstrations: fewer than half of them are right."""

with_and_without_replay = pytest.mark.parametrize("replay", [(), R3], ids=["plain", "R3"])


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Materials, Path]:
    """Return the quickstart's files, and its model after the demonstrations."""
    folder = tmp_path_factory.mktemp("learning")
    materials = prepare(folder / "materials", seed=0, with_experts=True)
    return materials, warm_start(materials, folder / "sft", seed=0, keys=["trainer.device=cpu"])


@pytest.fixture(scope="module")
def warm_on_fewer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Materials, Path]:
    """Return the files of the short form, and its model after the demonstrations."""
    folder = tmp_path_factory.mktemp("short")
    counts = {"NUM_DEMONSTRATIONS": 8000, "NUM_TRAIN": 800, "NUM_TEST": 128, "NUM_UNSEEN": 2}
    questions = {
        "TEMPLATES": tuple(TEMPLATES[i] for i in (0, 1, 2, 5)),
        "MAX_TERM": 6,
        "MAX_FACTOR": 4,
    }
    with pytest.MonkeyPatch.context() as patch:
        for place, values in ((module, counts), (word_problems, questions)):
            for name, value in values.items():
                patch.setattr(place, name, value)
        task = replace(WORD_PROBLEMS, writers=WRITERS)
        materials = prepare(folder / "materials", seed=0, task=task, with_experts=True)
    keys = (*SHORT_WARM_UP, "trainer.device=cpu")
    return materials, warm_start(materials, folder / "sft", seed=0, keys=keys)


@with_and_without_replay
def test_mo22_a_small_mixture_learns_an_easier_task(
    replay: tuple[str, ...], warm_on_fewer: tuple[Materials, Path], tmp_path: Path
) -> None:
    rows = learned(*warm_on_fewer, tmp_path, "trainer.test_freq=12", *replay, num_steps=12)
    assert 0.05 < rows[0][ACCURACY] < 0.6
    assert rows[12][ACCURACY] >= 0.9


@pytest.mark.deep
@with_and_without_replay
def test_mo22_a_small_mixture_learns(
    replay: tuple[str, ...], warm: tuple[Materials, Path], tmp_path: Path
) -> None:
    rows = learned(*warm, tmp_path, *replay, num_steps=40)
    assert rows[0][ACCURACY] < 0.4
    assert rows[40][ACCURACY] >= 0.9


def learned(
    materials: Materials, model: Path, folder: Path, *keys: str, num_steps: int
) -> dict[int, dict[str, float]]:
    """Train with GRPO and return the metrics, of which those of experts are as expected."""
    arguments = (
        GRPO,
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={num_steps}",
        "trainer.device=cpu",
        "trainer.logger=[]",
        *keys,
    )
    config = load_config(RunConfig, list(arguments)).config
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0
    rows = metrics_of(folder)
    assert rows[num_steps]["actor/experts/max_over_mean"] <= 4
    assert ("actor/router/replay_overlap" in rows[num_steps]) == (R3[0] in keys)
    return rows
