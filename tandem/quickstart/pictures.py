# SPDX-License-Identifier: Apache-2.0
"""Questions about small pictures: how many shapes, and the colour, kind or place of a single one.

Pictures of 24 x 24 pixels show squares, circles and crosses in nine cells. The answer is one word.
The last demonstrations are by writers with habits: they count one too many, and call most colours
red, most shapes squares and most places the middle. GRPO has to unlearn that, for which the model
must look.
"""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tandem.data.files import write_parquet
from tandem.quickstart.materials import (
    NUM_TEST,
    NUM_UNSEEN,
    UNSEEN_SEED,
    Materials,
    errors_of_folder,
)
from tandem.quickstart.seeing_model import VISION_TOKENS, write_seeing_model
from tandem.quickstart.task import is_held_out
from tandem.quickstart.tokenizer import (
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    save_tokenizer,
    train_tokenizer,
)

DATA_SOURCE = "tandem/pictures"
BATCH = 64
NUM_GOOD_STEPS, NUM_HABIT_STEPS = 350, 100
"""The numbers of steps of the warm start, with right answers and with those of habit."""
SHARE_RIGHT = 0.3
"""The share of right answers among those of habit."""
NUM_TRAIN = 3_200
CELL, SIDE = 8, 3
"""The pixels of a cell, and the cells on a side of a picture."""
COLOURS: Mapping[str, tuple[int, int, int]] = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "white": (245, 245, 245),
}
SHAPES = ("square", "circle", "cross")
KINDS = ("count", "colour", "shape", "place")
BACKGROUND = (15, 15, 20)
_TEST_SEED = 60_601
"""The seed of the held-out questions, by which no recipe and no model was chosen."""

SFT_KEYS = (
    f"data.train_batch_size={BATCH}",
    "data.shuffle=False",  # the answers of habit come last
    "data.max_length=64",
    f"trainer.total_training_steps={NUM_GOOD_STEPS + NUM_HABIT_STEPS}",
    "trainer.total_epochs=1",
)
GRPO_KEYS = (
    "data.max_response_length=4",
    # Places are guessed right once in nine times: with 8 samples, many prompts teach nothing.
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.actor.optim.lr=0.001",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "custom_reward_function.path=pkg://tandem.quickstart.pictures",
    "custom_reward_function.name=score",
    "trainer.total_training_steps=200",
    "trainer.total_epochs=2",
    "trainer.test_freq=50",
)
"""The keys of the recipes that differ from those of text."""


@dataclass(frozen=True)
class Scene:
    """A picture and a question: (cell, colour, shape) of each shape, the first of which is asked.

    Attributes:
        kind: what is asked, one of ``KINDS``.
    """

    kind: str
    shapes: tuple[tuple[int, str, str], ...]

    @property
    def key(self) -> tuple[tuple[int, str, str], ...]:
        """The shapes in the order of their cells."""
        return tuple(sorted(self.shapes))

    @property
    def question(self) -> str:
        """The text of the prompt."""
        return f"<image>{self.kind}?"

    @property
    def result(self) -> str:
        """The right answer."""
        cell, colour, shape = self.shapes[0]
        return {"count": str(len(self.shapes)), "colour": colour, "shape": shape}.get(
            self.kind, str(cell)
        )

    @property
    def habit(self) -> str:
        """The answer of a writer who does not look closely."""
        count = str(len(self.shapes) + 1)
        return {"count": count, "colour": "red", "shape": "square", "place": "4"}[self.kind]


def score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Return 1 for the right word and 0 for any other answer."""
    is_right = float(solution_str.strip() == ground_truth)
    return {"score": is_right, "acc": is_right}


def draw_scene(rng: random.Random) -> Scene:
    """Draw a question, with one to four shapes if they are to be counted, and one if not."""
    kind = rng.choice(KINDS)
    cells = rng.sample(range(SIDE**2), rng.randint(1, 4) if kind == "count" else 1)
    return Scene(kind, tuple((c, rng.choice(list(COLOURS)), rng.choice(SHAPES)) for c in cells))


def draw_scenes(count: int, *, seed: int, held_out: bool = False) -> list[Scene]:
    """Draw scenes. One combination of shapes in twenty is held out of all but ``held_out``."""
    rng = random.Random(seed)
    scenes: list[Scene] = []
    while len(scenes) < count:
        scene = draw_scene(rng)
        if is_held_out(scene) == held_out:
            scenes.append(scene)
    return scenes


def paint(scene: Scene, *, is_black: bool = False) -> bytes:
    """Return the picture of a scene in PNG, black if nothing is to be seen."""
    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), (0, 0, 0) if is_black else BACKGROUND)
    pen = ImageDraw.Draw(image)
    for cell, colour, shape in () if is_black else scene.shapes:
        x, y = cell % SIDE * CELL, cell // SIDE * CELL
        box, fill = (x + 1, y + 1, x + 6, y + 6), COLOURS[colour]
        if shape == "square":
            pen.rectangle(box, fill=fill)
        elif shape == "circle":
            pen.ellipse(box, outline=fill, width=2)
        else:
            pen.line(box, fill=fill, width=2)
            pen.line((x + 1, y + 6, x + 6, y + 1), fill=fill, width=2)
    stream = io.BytesIO()
    image.save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def prepare_pictures(folder: Path, *, seed: int, family: str, is_black: bool) -> Materials:
    """Write all files into ``folder``, as ``materials.prepare`` does for text.

    Args:
        family: the ``model_type`` of the model.
        is_black: whether all pictures are black.

    Raises:
        UserError: the folder cannot be written.
    """
    model = folder / "model"
    with errors_of_folder(folder):
        model.mkdir(parents=True, exist_ok=True)
        num_parameters = _write_policy(model, family, seed=seed)
    rows = _demonstrations(seed, is_black=is_black)
    write_parquet(rows, folder / "sft.parquet", key="--folder")
    splits = {
        "train": draw_scenes(NUM_TRAIN, seed=5000 + seed),
        "test": draw_scenes(NUM_TEST, seed=_TEST_SEED),
        "test_unseen": draw_scenes(NUM_UNSEEN, seed=UNSEEN_SEED, held_out=True),
    }
    for split, scenes in splits.items():
        _write_prompts(folder / f"{split}.parquet", scenes, is_black=is_black)
    return Materials(
        model=model,
        demonstrations=folder / "sft.parquet",
        train=folder / "train.parquet",
        test=folder / "test.parquet",
        test_unseen=folder / "test_unseen.parquet",
        num_parameters=num_parameters,
        data_source=DATA_SOURCE,
        parts="shapes",
    )


def _write_policy(folder: Path, family: str, *, seed: int) -> int:
    """Write tokenizer and random weights; return the number of parameters."""
    special = (*SPECIAL_TOKENS, *VISION_TOKENS)
    words = [*(f"{kind}?" for kind in KINDS), *COLOURS, *SHAPES, *map(str, range(10))]
    tokenizer = train_tokenizer(words * 10, special_tokens=special)
    save_tokenizer(tokenizer, folder)
    ids = {token: special.index(token) for token in VISION_TOKENS} | {"eos": END_ID, "pad": PAD_ID}
    num_tokens = tokenizer.get_vocab_size()
    return write_seeing_model(folder, family, num_tokens=num_tokens, ids=ids, seed=seed)


def _demonstrations(seed: int, *, is_black: bool) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    num_good, num_habit = BATCH * NUM_GOOD_STEPS, BATCH * NUM_HABIT_STEPS
    scenes = draw_scenes(num_good + num_habit, seed=100 + seed)
    return [
        {
            "question": scene.question,
            "images": [{"bytes": paint(scene, is_black=is_black)}],
            "answer": scene.result
            if number < num_good or rng.random() < SHARE_RIGHT
            else scene.habit,
        }
        for number, scene in enumerate(scenes)
    ]


def _write_prompts(path: Path, scenes: Sequence[Scene], *, is_black: bool) -> None:
    """Write a file in verl's schema."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": scene.question}],
            "images": [{"bytes": paint(scene, is_black=is_black)}],
            "reward_model": {"style": "rule", "ground_truth": scene.result},
            "extra_info": {"index": index, "kind": scene.kind},
        }
        for index, scene in enumerate(scenes)
    ]
    write_parquet(rows, path, key="--folder")
