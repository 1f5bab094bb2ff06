# SPDX-License-Identifier: Apache-2.0
"""Write GSM8K as train.parquet (7473 rows) and test.parquet (1319 rows) in verl's prompt schema.

Reads openai/gsm8k through the datasets package, or train.jsonl and test.jsonl of a folder
(``--source``), as in github.com/openai/grade-school-math. A mistake is one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = ("train", "test")


class PreprocessError(Exception):
    """A mistake that the user can correct, described in one line."""


def extract_solution(answer: str) -> str:
    """The number after ``####`` without thousands separators."""
    match = re.search(r"#### (-?[0-9.,]+)", answer)
    if match is None:
        raise PreprocessError(f"no '#### <number>' in the answer {answer[-80:]!r}")
    return match.group(1).replace(",", "")


def make_row(example: dict[str, Any], *, split: str, index: int) -> dict[str, Any]:
    """Make a row of verl's schema from a question and its worked answer."""
    try:
        question, answer = example["question"], example["answer"]
    except (KeyError, TypeError) as error:
        raise PreprocessError(f"{split} row {index} lacks question or answer") from error
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": extract_solution(answer)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def read_jsonl(folder: Path, split: str) -> list[dict[str, Any]]:
    """The examples of one split from ``folder/split.jsonl``."""
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        raise PreprocessError(f"{folder} must hold {path.name}, which is missing")
    try:
        with path.open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise PreprocessError(f"{path} is not valid JSONL ({error})") from error


def read_hub(path: str, split: str) -> Iterable[dict[str, Any]]:
    """The examples of one split through the datasets package, from the hub or a local copy."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise PreprocessError(
            "the datasets package is not installed. Run pip install datasets, or give --source "
            "FOLDER with train.jsonl and test.jsonl from github.com/openai/grade-school-math"
        ) from error
    try:
        return load_dataset(path, "main", split=split)
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split())[:200]
        raise PreprocessError(
            f"{path} could not be loaded ({cause}). Give --source FOLDER with train.jsonl and "
            "test.jsonl"
        ) from error


def write_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows, replacing an older file only once the new one is complete."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise PreprocessError("pyarrow is not installed. Run pip install pyarrow") from error
    part = path.with_suffix(".parquet.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), part)
        part.replace(path)
    except OSError as error:
        raise PreprocessError(f"{path} could not be written ({error})") from error


def parse_arguments() -> argparse.Namespace:
    """verl's options and ``--source``."""
    parser = argparse.ArgumentParser(description="Write GSM8K in verl's prompt schema.")
    parser.add_argument("--local_dir", help="folder to write to (older name of --local_save_dir)")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k", help="folder to write to")
    parser.add_argument("--local_dataset_path", help="local copy of the data set on the hub")
    parser.add_argument("--source", help="folder with train.jsonl and test.jsonl, not the hub")
    parser.add_argument("--hdfs_dir", help="accepted; nothing is copied there")
    return parser.parse_args()


def prepare(arguments: argparse.Namespace) -> None:
    """Read, convert and write both splits; nothing is written unless both could be converted."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for split in SPLITS:
        if arguments.source is not None:
            examples = read_jsonl(Path(arguments.source).expanduser(), split)
        else:
            examples = read_hub(arguments.local_dataset_path or DATA_SOURCE, split)
        rows[split] = [make_row(x, split=split, index=i) for i, x in enumerate(examples)]
    folder = Path(arguments.local_dir or arguments.local_save_dir).expanduser()
    for split in SPLITS:
        path = folder / f"{split}.parquet"
        write_parquet(rows[split], path)
        print(f"{path}: {len(rows[split])} rows")
    if arguments.hdfs_dir is not None:
        print(f"Nothing was copied to HDFS; to do so: hdfs dfs -put {folder} {arguments.hdfs_dir}")


def main() -> int:
    """Exit code 0, or 2 after a one-line error."""
    try:
        prepare(parse_arguments())
    except PreprocessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
