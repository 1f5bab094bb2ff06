# SPDX-License-Identifier: Apache-2.0
"""Geometry3K as rows of verl's schema, from the hub or from a copy of its files.

The files are data/train-00000-of-00001.parquet and data/test-00000-of-00001.parquet, as in
huggingface.co/datasets/hiyouga/geometry3k. Problems hold the marks of their pictures.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tandem.data.files import Row, RowFault, RowSource
from tandem.data.gsm8k import read_hub
from tandem.data.images import stored
from tandem.errors import UserError

DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final "
    r"answer MUST BE put in \boxed{}."
)
KEY = "--source"
_COLUMNS = ("problem", "answer", "images")


def geo3k_rows(source: str, split: str) -> list[Row]:
    """Return the rows of one split.

    Args:
        source: a folder with the files of the hub, or a name for the datasets package.

    Raises:
        UserError: the split cannot be read, or an example is not Geometry3K's.
    """
    folder = Path(os.path.expanduser(source))
    examples: Iterable[Mapping[str, Any]]
    if folder.is_dir():
        files = sorted(folder.glob(f"data/{split}-*.parquet"))
        if not files:
            rule = f"must hold data/{split}-00000-of-00001.parquet"
            raise UserError(KEY, source, rule=rule, remedy="Download the data set to that folder.")
        examples = RowSource([str(file) for file in files], KEY).read()
    else:
        remedy = f"Give {KEY} FOLDER with a copy of the data set's files."
        examples = read_hub(source, split, configuration=None, remedy=remedy)
    return [_row(example, split=split, index=index) for index, example in enumerate(examples)]


def _row(example: Mapping[str, Any], *, split: str, index: int) -> Row:
    remedy = "Name Geometry3K's own files; docs/vision.md lists the columns for others."
    if not all(column in example for column in _COLUMNS):
        rule = f"{split} row {index} lacks one of {', '.join(_COLUMNS)}"
        raise UserError(KEY, rule=rule, remedy=remedy)
    problem, answer = example["problem"], example["answer"]
    try:
        images = [stored(picture) for picture in example["images"]]
    except RowFault as fault:
        rule = f"{split} row {index} {fault.rule}"
        raise UserError(KEY, rule=rule, remedy=remedy) from fault
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
    }
