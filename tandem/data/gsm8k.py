# SPDX-License-Identifier: Apache-2.0
"""GSM8K as rows of verl's schema, from the hub or from the files of its authors.

The files are train.jsonl and test.jsonl, as in github.com/openai/grade-school-math.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.data.files import Row, RowSource
from tandem.errors import UserError

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")
KEY = "--source"


def gsm8k_rows(source: str, split: str) -> list[Row]:
    """Return the rows of one split.

    Args:
        source: a folder with train.jsonl and test.jsonl, or a name or a copy for the datasets
            package.

    Raises:
        UserError: the split cannot be read, or an example is not GSM8K's.
    """
    folder = Path(os.path.expanduser(source))
    is_jsonl = any((folder / f"{name}.jsonl").is_file() for name in SPLITS)
    remedy = f"Give {KEY} FOLDER with train.jsonl and test.jsonl."
    examples = (
        _read_jsonl(folder, split)
        if is_jsonl
        else read_hub(source, split, configuration="main", remedy=remedy)
    )
    return [_row(example, split=split, index=index) for index, example in enumerate(examples)]


def _row(example: Mapping[str, Any], *, split: str, index: int) -> Row:
    if not isinstance(example, Mapping) or not {"question", "answer"} <= example.keys():
        raise _not_gsm8k(f"{split} row {index} lacks question or answer")
    question, answer = example["question"], example["answer"]
    match = re.search(r"#### (-?[0-9.,]+)", answer)
    if match is None:
        raise _not_gsm8k(f"{split} row {index} has no '#### <number>' in its answer")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": match.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def _not_gsm8k(rule: str) -> UserError:
    return UserError(KEY, rule=rule, remedy="Name GSM8K's own files; docs/data.md converts others.")


def _read_jsonl(folder: Path, split: str) -> list[Row]:
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise UserError(
            KEY, str(folder), rule=f"must hold {path.name}", remedy="Download it to that folder."
        )
    return RowSource([str(path)], KEY).read()


def read_hub(
    name: str, split: str, *, configuration: str | None, remedy: str
) -> Iterable[Mapping[str, Any]]:
    """Return a split of a data set of the hub, or of a copy of it.

    Args:
        configuration: the name of its configuration, if it has several.
        remedy: what to do without the hub.

    Raises:
        UserError: the datasets package is missing, or cannot read the data set.
    """
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            KEY,
            name,
            rule="reading the hub needs the datasets package, which is not installed",
            remedy=f"Run pip install datasets. Or: {remedy}",
        ) from error
    try:
        return load_dataset(name, configuration, split=split)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(KEY, name, rule=f"cannot be loaded ({cause})", remedy=remedy) from error
