# SPDX-License-Identifier: Apache-2.0
"""``tandem prepare NAME --output FOLDER``: write a known data set in the schema of ``train``.

The options of verl's script for the same purpose are accepted as well.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tandem.data import geo3k, gsm8k
from tandem.data.files import Row, write_parquet
from tandem.data.gsm8k import SPLITS

DATA_SETS: Mapping[str, tuple[Callable[[str, str], list[Row]], str]] = {
    "gsm8k": (gsm8k.gsm8k_rows, gsm8k.DATA_SOURCE),
    "geo3k": (geo3k.geo3k_rows, geo3k.DATA_SOURCE),
}
"""The function that reads a split of each data set, and the set's name on the hub."""


def run(arguments: Sequence[str]) -> int:
    """Write train.parquet and test.parquet; nothing is written unless both can be converted."""
    options = _parser().parse_args(arguments)
    folder = Path(os.path.expanduser(options.output or f"~/data/{options.name}"))
    rows_of, default = DATA_SETS[options.name]
    rows = {split: rows_of(options.source or default, split) for split in SPLITS}
    for split in SPLITS:
        path = folder / f"{split}.parquet"
        write_parquet(rows[split], path, key="--output")
        print(f"{path}: {len(rows[split])} rows")
    if options.hdfs_dir is not None:
        print(f"Nothing was copied to HDFS; to do so: hdfs dfs -put {folder} {options.hdfs_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tandem prepare",
        description="Write train.parquet and test.parquet of a known data set.",
    )
    parser.add_argument("name", choices=list(DATA_SETS), help="the data set")
    parser.add_argument(
        "--output",
        "--local_dir",
        "--local_save_dir",
        metavar="FOLDER",
        help="the folder to write to (default: ~/data/NAME)",
    )
    parser.add_argument(
        "--source",
        "--local_dataset_path",
        metavar="FOLDER_OR_NAME",
        help="a folder with a copy of the data set (gsm8k: train.jsonl and test.jsonl), or its "
        "name for the datasets package (default: openai/gsm8k, hiyouga/geometry3k)",
    )
    parser.add_argument("--hdfs_dir", help="accepted; nothing is copied there")
    return parser
