# SPDX-License-Identifier: Apache-2.0
"""Rows of parquet, JSONL and JSON files, several files concatenated in order.

Counting reads parquet metadata only. Imports neither torch nor transformers, and pyarrow only when
a parquet file is met, so that the planner stays light. Local files only: no hdfs, no URLs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Row = dict[str, Any]


class RowFault(Exception):
    """What is wrong with a row, as the end of a sentence; ``RowSource.fault`` adds where it is."""


@dataclass(frozen=True, slots=True)
class RowSource:
    """Files with the configuration key that named them."""

    files: Sequence[str]
    key: str

    def read(self) -> list[Row]:
        """As ``read_rows``."""
        return read_rows(self.files, key=self.key)

    def fault(self, row: int, reason: str) -> UserError:
        """The error for row ``row`` of ``read()``, which is counted from 0 in its own file.

        Example:
            >>> RowSource(["a.parquet", "b.parquet"], "data.train_files").fault(7480, "is empty.")
            UserError("data.train_files='b.parquet': row 7 is empty.")
        """
        for path in _existing(self.files, self.key):
            count = _count_file(path, self.key)
            if row < count:
                return UserError(f"{self.key}={str(path)!r}: row {row} {reason}")
            row -= count
        raise IndexError(f"{self.key} has no such row; {row} beyond its end")


def count_rows(files: Sequence[str], *, key: str = "data.train_files") -> int:
    """Number of rows of all files together.

    Args:
        files: paths; ``~`` is expanded.
        key: the configuration key the paths came from, for messages.

    Raises:
        UserError: a file is missing, empty or unreadable, or there is none.
    """
    return sum(_count_file(path, key) for path in _existing(files, key))


def read_rows(files: Sequence[str], *, key: str = "data.train_files") -> list[Row]:
    """All rows of all files, in order. Arguments and errors as ``count_rows``."""
    return [row for path in _existing(files, key) for row in _read_file(path, key)]


def _existing(files: Sequence[str], key: str) -> Iterator[Path]:
    if not files:
        raise UserError(f"{key}=[]: at least one file is needed. Set {key}=/path/to/file.parquet.")
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"{key}={name!r}: no such file. {_remedy(path)}")
        if not os.access(path, os.R_OK):
            raise UserError(f"{key}={name!r}: may not be read. Change the file's permissions.")
        yield path


def _remedy(path: Path) -> str:
    if "gsm8k" in str(path).lower():
        folder = path.parent
        return f"Make it with: python3 examples/data_preprocess/gsm8k.py --local_dir {folder}"
    return "Check the path; parquet, .jsonl and .json are read."


def _is_json(path: Path) -> bool:
    return path.suffix.lower() in (".json", ".jsonl")


def _count_file(path: Path, key: str) -> int:
    if not _is_json(path):
        with _open_parquet(path, key) as parquet:
            count = parquet.metadata.num_rows
    elif _holds_array(path):
        count = len(_read_array(path, key))
    else:
        with path.open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
    return _checked_count(count, path, key=key)


def _read_file(path: Path, key: str) -> list[Row]:
    if not _is_json(path):
        with _open_parquet(path, key) as parquet:
            rows = _parquet_rows(parquet, path, key=key)
    elif _holds_array(path):
        rows = _read_array(path, key)
    else:
        rows = _read_lines(path, key)
    _checked_count(len(rows), path, key=key)
    return rows


def _checked_count(count: int, path: Path, *, key: str) -> int:
    if count == 0:
        raise UserError(f"{key}={str(path)!r}: the file holds no rows. {_remedy(path)}")
    return count


def _open_parquet(path: Path, key: str) -> ParquetFile:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{key}={str(path)!r}: reading parquet needs pyarrow, which is not installed. "
            "Install it with pip install pyarrow, or give a .jsonl file."
        ) from error
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, key=key) from error


def _parquet_rows(parquet: ParquetFile, path: Path, *, key: str) -> list[Row]:
    try:
        return parquet.read().to_pylist()
    except (OSError, ValueError) as error:
        raise _unreadable(path, error, key=key) from error


def _unreadable(path: Path, error: Exception, *, key: str) -> UserError:
    cause = " ".join(str(error).split())[:200]
    return UserError(f"{key}={str(path)!r}: not a readable parquet file ({cause}). {_remedy(path)}")


def _holds_array(path: Path) -> bool:
    """Whether a .json file is one array; otherwise it is read as one object a line, like .jsonl."""
    with path.open("rb") as content:
        return content.read(64).lstrip().startswith(b"[")


def _read_array(path: Path, key: str) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{key}={str(path)!r}: not valid JSON ({error}). Mend it.") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{key}={str(path)!r}: row {number} is not a JSON object. Mend it.")
    return rows


def _read_lines(path: Path, key: str) -> list[Row]:
    rows: list[Row] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_parse_line(line, f"{key}={str(path)!r}: line {number}"))
    return rows


def _parse_line(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error}). Mend or remove it.") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object. Mend or remove it.")
    return row
