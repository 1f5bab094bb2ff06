# SPDX-License-Identifier: Apache-2.0
"""The files that the quickstart trains on, in the formats of users' own files.

They are parquet prompts in verl's schema, parquet demonstrations of mixed quality, and a Hugging
Face folder with tokenizer and random model. No question of the tests occurs in the training data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tandem.data.files import write_parquet
from tandem.errors import UserError
from tandem.quickstart.calculator import CALCULATOR
from tandem.quickstart.counting import COUNTING
from tandem.quickstart.model import write_expert_model, write_model
from tandem.quickstart.python_code import PYTHON
from tandem.quickstart.sorting import SORTING
from tandem.quickstart.task import AnyProblem, Task
from tandem.quickstart.tokenizer import (
    CHAT_TEMPLATE,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    TOOL_TAGS,
    TOOL_TEMPLATE,
    save_tokenizer,
    train_tokenizer,
)
from tandem.quickstart.word_problems import WORD_PROBLEMS

NUM_DEMONSTRATIONS = 20_000
NUM_TRAIN = 8_000
NUM_TEST = 256
NUM_UNSEEN = 200
NUM_TOKENIZER_TEXTS = 4_000

DATA_SOURCE = "openai/gsm8k"
"""The data source of GSM8K, whose reward compares the number after the last ``####``."""

# Tests and tokenizer do not depend on a run's seed, which makes accuracies comparable.
TEST_SEED = 7777
UNSEEN_SEED = 4242
TOKENIZER_SEED = 1

TASKS: Mapping[str, Task[Any]] = MappingProxyType(
    {
        "words": WORD_PROBLEMS,
        "sorting": SORTING,
        "counting": COUNTING,
        "calculator": CALCULATOR,
        "python": PYTHON,
    }
)
"""The tasks by name."""


@dataclass(frozen=True)
class Materials:
    """The paths of the files. ``test_unseen`` has only combinations of ``parts`` not trained on."""

    model: Path
    demonstrations: Path
    train: Path
    test: Path
    test_unseen: Path
    num_parameters: int
    data_source: str = DATA_SOURCE
    parts: str = "numbers"


@contextmanager
def errors_of_folder(folder: Path) -> Iterator[None]:
    """Raise UserError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            "--folder",
            str(folder),
            rule=f"cannot be written ({error.strerror or error})",
            remedy="Choose another folder, or free some space.",
        ) from error


def prepare(
    folder: Path, *, seed: int, task: Task[Any] = WORD_PROBLEMS, with_experts: bool = False
) -> Materials:
    """Write all files into ``folder``, in about two seconds.

    Args:
        folder: the folder for ``model/``, ``sft.parquet``, ``train.parquet``, ``test.parquet`` and
            ``test_unseen.parquet``; made if it does not exist.
        seed: the seed of the initial weights, the demonstrations and the training prompts.
        task: the kind of problems.
        with_experts: whether the model is a mixture of experts.

    Raises:
        UserError: the folder cannot be written.
    """
    model = folder / "model"
    with errors_of_folder(folder):
        model.mkdir(parents=True, exist_ok=True)
        num_parameters = _write_policy(model, seed, task=task, with_experts=with_experts)
    materials = Materials(
        model=model,
        demonstrations=folder / "sft.parquet",
        train=folder / "train.parquet",
        test=folder / "test.parquet",
        test_unseen=folder / "test_unseen.parquet",
        num_parameters=num_parameters,
    )
    test = task.draw(NUM_TEST, seed=TEST_SEED)
    tested = {problem.question for problem in test}
    train = task.draw(NUM_TRAIN, seed=5000 + seed, but_not=tested)
    shown = task.draw(NUM_DEMONSTRATIONS, seed=100 + seed, but_not=tested)
    unseen = task.draw_unseen(NUM_UNSEEN, seed=UNSEEN_SEED)
    pairs = task.demonstrations(shown, seed=seed)
    rows: list[dict[str, Any]] = [_demonstration(*pair, task=task) for pair in pairs]
    write_parquet(rows, materials.demonstrations, key="--folder")
    _write_prompts(materials.train, train, task=task, split="train")
    _write_prompts(materials.test, test, task=task, split="test")
    _write_prompts(materials.test_unseen, unseen, task=task, split="test_unseen")
    return materials


def _write_policy(folder: Path, seed: int, *, task: Task[Any], with_experts: bool) -> int:
    """Write tokenizer and random weights; return the number of parameters."""
    problems = task.draw(NUM_TOKENIZER_TEXTS, seed=TOKENIZER_SEED)
    special, template = SPECIAL_TOKENS, CHAT_TEMPLATE
    texts = [f"{p.question}\n{task.correct(p)}" for p in problems]
    if task.tools is not None:
        special, template = (*SPECIAL_TOKENS, *TOOL_TAGS), TOOL_TEMPLATE
        answered = [(p.question, write(p)) for p in problems for write, _ in task.writers]
        texts = [text for pair in answered for text in _texts(task.tools.messages_of(*pair))]
    tokenizer = train_tokenizer(texts, special_tokens=special)
    save_tokenizer(tokenizer, folder, chat_template=template)
    num_tokens = tokenizer.get_vocab_size()
    write = write_expert_model if with_experts else write_model
    return write(folder, num_tokens=num_tokens, eos_id=END_ID, pad_id=PAD_ID, seed=seed)


def _demonstration(question: str, answer: str, *, task: Task[Any]) -> dict[str, Any]:
    if task.tools is None:
        return {"question": question, "answer": answer}
    return {"messages": task.tools.messages_of(question, answer)}


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts between the special tokens of a conversation."""
    texts: list[str] = []
    for message in messages:
        texts.append(message["content"])
        for call in message.get("tool_calls", ()):
            function = call["function"]
            texts.append("\n" + json.dumps(function) + "\n")
    return texts


def _write_prompts(
    path: Path, problems: Sequence[AnyProblem], *, task: Task[Any], split: str
) -> None:
    """Write a file in verl's schema."""
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            **({} if task.tools is None else {"agent_name": "tool_agent"}),
            "reward_model": {"style": "rule", "ground_truth": problem.result},
            "extra_info": {
                "split": split,
                "index": index,
                "question": problem.question,
                "answer": task.correct(problem),
            },
        }
        for index, problem in enumerate(problems)
    ]
    write_parquet(rows, path, key="--folder")
