# SPDX-License-Identifier: Apache-2.0
"""Files that several config tests need."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def write_rows(path: Path, count: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"prompt": [""] * count}), path)


@pytest.fixture
def gsm8k_home(tmp_path: Path) -> Path:
    """A home folder with files of GSM8K's row counts at verl's place."""
    write_rows(tmp_path / "data/gsm8k/train.parquet", 7473)
    write_rows(tmp_path / "data/gsm8k/test.parquet", 1319)
    return tmp_path
