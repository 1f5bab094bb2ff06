# SPDX-License-Identifier: Apache-2.0
"""``tandem prepare gsm8k --output FOLDER``: write a known data set in the schema of ``train``.

The options of verl's script for the same purpose are accepted as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tandem.data.files import write_parquet
from tandem.data.gsm8k import DATA_SOURCE, SPLITS, gsm8k_rows


def run(arguments: Sequence[str]) -> int:
    """Write train.parquet and test.parquet; nothing is written unless both can be converted."""
    options = _parser().parse_args(arguments)
    folder = Path(options.output).expanduser()
    rows = {split: gsm8k_rows(options.source, split) for split in SPLITS}
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
    parser.add_argument("name", choices=["gsm8k"], help="the data set")
    parser.add_argument(
        "--output",
        "--local_dir",
        "--local_save_dir",
        metavar="FOLDER",
        default="~/data/gsm8k",
        help="the folder to write to (default: %(default)s)",
    )
    parser.add_argument(
        "--source",
        "--local_dataset_path",
        metavar="FOLDER_OR_NAME",
        default=DATA_SOURCE,
        help="a folder with train.jsonl and test.jsonl, or a data set for the datasets package "
        "(default: %(default)s)",
    )
    parser.add_argument("--hdfs_dir", help="accepted; nothing is copied there")
    return parser
