# SPDX-License-Identifier: Apache-2.0
"""The quickstart's pictures: scenes, answers and files; and what it learns (deep)."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.errors import UserError
from tandem.quickstart import command, pictures
from tandem.quickstart.materials import Materials
from tandem.quickstart.pictures import COLOURS, Scene, draw_scenes, paint, score
from tests.fakes.tiny_run import metrics_of

ON_CPU = ("trainer.device=cpu", "trainer.logger=[]")


def test_answers_follow_from_the_scene() -> None:
    shapes = ((3, "blue", "cross"), (0, "red", "circle"))
    asked = {kind: Scene(kind, shapes[:1]) for kind in pictures.KINDS}
    assert [scene.result for scene in asked.values()] == ["1", "blue", "cross", "3"]
    assert Scene("count", shapes).result == "2" and Scene("count", shapes).habit == "3"
    right = score("", " cross\n", ground_truth="cross", extra_info={})
    assert right == {"score": 1.0, "acc": 1.0}
    assert score("", "cross?", ground_truth="cross", extra_info={})["acc"] == 0.0


def test_scenes_are_balanced_and_some_are_held_out() -> None:
    scenes, unseen = draw_scenes(2000, seed=1), draw_scenes(50, seed=1, held_out=True)
    assert set(Counter(scene.kind for scene in scenes)) == set(pictures.KINDS)
    assert not {scene.key for scene in scenes} & {scene.key for scene in unseen}
    for kind in pictures.KINDS:
        of_kind = [scene for scene in scenes if scene.kind == kind]
        most = Counter(scene.result for scene in of_kind).most_common(1)[0][1]
        assert most / len(of_kind) < 0.4  # guessing does not help


def test_a_picture_shows_its_scene_and_a_black_one_nothing() -> None:
    scene = Scene("place", ((5, "green", "square"),))
    image = np.asarray(Image.open(io.BytesIO(paint(scene))))
    assert tuple(image[8 + 3, 16 + 3]) == COLOURS["green"]
    assert image.shape == (24, 24, 3)
    assert not np.asarray(Image.open(io.BytesIO(paint(scene, is_black=True)))).any()


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for words, name in (
        (["--black-pictures"], "--black-pictures"),
        (["--family", "qwen3_vl"], "--family"),
        (["--vision", "--lora"], "--lora"),
        (["--vision", "--task", "sorting"], "--task"),
    ):
        with pytest.raises(UserError, match=name):
            command.run(["--folder", str(tmp_path / "all"), *words])


def test_the_quickstart_with_pictures_ends_with_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, value in (("NUM_GOOD_STEPS", 1), ("NUM_HABIT_STEPS", 0), ("NUM_TRAIN", 32)):
        monkeypatch.setattr(pictures, number, value)
    monkeypatch.setattr(pictures, "NUM_TEST", 16)
    monkeypatch.setattr(pictures, "NUM_UNSEEN", 16)
    monkeypatch.setattr(command, "warm_start", lambda materials, folder, **_: materials.model)
    words = ("data.train_batch_size=4", "trainer.test_freq=1", "trainer.total_training_steps=1")
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    random.seed(0)
    assert command.run(["--vision", "--folder", str(tmp_path), *words, mini]) == 0
    told = capsys.readouterr()
    numbers = json.loads(told.out.splitlines()[-1])
    assert numbers["parameters"] > 200_000 and "unseen scenes" in told.err
    assert "tandem sample" not in told.err


def reinforced(materials: Materials, model: Path, folder: Path) -> list[float]:
    """Return the greedy accuracy before and after 30 small steps of the quickstart's GRPO."""
    arguments = (
        str(Path(command.__file__).parent / "grpo.yaml"),
        *pictures.GRPO_KEYS,
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=8",
        f"trainer.default_local_dir={folder}",
        "trainer.total_training_steps=30",
        "trainer.test_freq=30",
        *ON_CPU,
    )
    config = load_config(RunConfig, arguments).config
    assert run_prepared(local_site(config), train.prepare(config)).exit_code == 0
    rows = metrics_of(folder)
    return [rows[step]["val-core/tandem/pictures/acc/mean@1"] for step in (0, 30)]


def test_VL11_reward_teaches_to_look_and_black_pictures_nothing(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VL11: a short form, which asks for colours alone."""
    sizes = {"BATCH": 32, "NUM_GOOD_STEPS": 100, "NUM_HABIT_STEPS": 20, "NUM_TRAIN": 500}
    for name, value in {**sizes, "NUM_TEST": 100, "NUM_UNSEEN": 10}.items():
        monkeypatch.setattr(pictures, name, value)
    monkeypatch.setattr(pictures, "KINDS", ("colour",))
    kinds = {"seed": 0, "family": "qwen2_5_vl"}
    seen = pictures.prepare_pictures(tmp_path / "seen", is_black=False, **kinds)
    black = pictures.prepare_pictures(tmp_path / "black", is_black=True, **kinds)
    steps = ("data.train_batch_size=32", "trainer.total_training_steps=120")
    keys = (*pictures.SFT_KEYS, *steps, *ON_CPU)
    warm = command.warm_start(seen, tmp_path / "sft", seed=0, keys=keys)
    before, after = reinforced(seen, warm, tmp_path / "looking")
    assert before < 0.5 and after >= 0.65
    assert reinforced(black, warm, tmp_path / "blind")[1] < 0.5


@pytest.mark.deep
@pytest.mark.parametrize(
    ("words", "least", "most"),
    [
        (["--seed", "0"], 0.8, 1.0),
        (["--seed", "1"], 0.8, 1.0),
        (["--seed", "2"], 0.8, 1.0),
        (["--family", "qwen3_vl"], 0.8, 1.0),
        (["--black-pictures"], 0.0, 0.4),
    ],
)
def test_VL11_the_model_learns_to_look(  # noqa: N802
    words: list[str],
    least: float,
    most: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """VL11: the whole quickstart.

    Rounding on another processor is as good as another seed: seed 2 reached 0.99 on one and 0.86 on
    another, where it had 0.80 fifty steps before. Without pictures, no seed has reached 0.4.
    """
    assert command.run(["--vision", "--folder", str(tmp_path), *words]) == 0
    numbers = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert least <= numbers["accuracy_after"] <= most
