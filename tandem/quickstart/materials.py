# SPDX-License-Identifier: Apache-2.0
"""The files that the quickstart trains on, in the formats of users' own files.

They are parquet prompts in verl's schema, parquet demonstrations of mixed quality, and a Hugging
Face folder with tokenizer and random model. No question of the tests occurs in the training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from pyarrow import parquet

from tandem.quickstart.model import write_model
from tandem.quickstart.task import (
    Problem,
    correct,
    demonstrations,
    draw_problems,
    draw_unseen_problems,
)
from tandem.quickstart.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer

NUM_DEMONSTRATIONS = 20_000
NUM_TRAIN = 8_000
NUM_TEST = 256
NUM_UNSEEN = 200
NUM_TOKENIZER_TEXTS = 4_000

# Tests and tokenizer do not depend on a run's seed, which makes accuracies comparable.
TEST_SEED = 7777
UNSEEN_SEED = 4242
TOKENIZER_SEED = 1

DATA_SOURCE = "openai/gsm8k"
"""The data source of GSM8K, whose reward compares the number after the last ``####``."""


@dataclass(frozen=True)
class Materials:
    """The paths of the files. ``test_unseen`` has only combinations of numbers not trained on."""

    model: Path
    demonstrations: Path
    train: Path
    test: Path
    test_unseen: Path
    num_parameters: int


def prepare(folder: Path, *, seed: int) -> Materials:
    """Write all files into ``folder``, in about two seconds.

    Args:
        folder: the folder for ``model/``, ``sft.parquet``, ``train.parquet``, ``test.parquet`` and
            ``test_unseen.parquet``; made if it does not exist.
        seed: the seed of the initial weights, the demonstrations and the training prompts.
    """
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    num_parameters = _write_policy(model, seed)
    materials = Materials(
        model=model,
        demonstrations=folder / "sft.parquet",
        train=folder / "train.parquet",
        test=folder / "test.parquet",
        test_unseen=folder / "test_unseen.parquet",
        num_parameters=num_parameters,
    )
    test = draw_problems(NUM_TEST, seed=TEST_SEED)
    tested = {problem.question for problem in test}
    train = draw_problems(NUM_TRAIN, seed=5000 + seed, but_not=tested)
    shown = draw_problems(NUM_DEMONSTRATIONS, seed=100 + seed, but_not=tested)
    unseen = draw_unseen_problems(NUM_UNSEEN, seed=UNSEEN_SEED)
    _write_demonstrations(materials.demonstrations, shown, seed=seed)
    _write_prompts(materials.train, train, split="train")
    _write_prompts(materials.test, test, split="test")
    _write_prompts(materials.test_unseen, unseen, split="test_unseen")
    return materials


def _write_policy(folder: Path, seed: int) -> int:
    """Write tokenizer and random weights; return the number of parameters."""
    problems = draw_problems(NUM_TOKENIZER_TEXTS, seed=TOKENIZER_SEED)
    tokenizer = train_tokenizer(f"{p.question}\n{correct(p)}" for p in problems)
    save_tokenizer(tokenizer, folder)
    num_tokens = tokenizer.get_vocab_size()
    return write_model(folder, num_tokens=num_tokens, eos_id=END_ID, pad_id=PAD_ID, seed=seed)


def _write_demonstrations(path: Path, problems: Sequence[Problem], *, seed: int) -> None:
    pairs = list(demonstrations(problems, seed=seed))
    columns = {
        "question": [question for question, _ in pairs],
        "answer": [answer for _, answer in pairs],
    }
    parquet.write_table(pyarrow.table(columns), path)


def _write_prompts(path: Path, problems: Sequence[Problem], *, split: str) -> None:
    """Write a file in verl's schema."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.result},
            "extra_info": {
                "split": split,
                "index": index,
                "question": problem.question,
                "answer": correct(problem),
            },
        }
        for index, problem in enumerate(problems)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
