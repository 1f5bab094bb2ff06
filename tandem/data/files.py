# SPDX-License-Identifier: Apache-2.0
"""The rows of local parquet, JSONL and JSON files, several files concatenated in order.

Counting rows reads only the metadata of parquet files. pyarrow is imported when a parquet file is
opened, which keeps the planner light.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Row = dict[str, Any]


class RowFault(Exception):
    """The error of a row. ``RowSource.fault`` adds the file and the number of the row.

    Args:
        rule: the predicate of a sentence whose subject is the row, such as "has no prompt".
        remedy: one or more sentences that say what to change.
    """

    def __init__(self, rule: str, remedy: str = "Correct or remove the row.") -> None:
        super().__init__(rule)
        self.rule = rule
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class RowSource:
    """Data files and the configuration key that names them.

    With ``loader``, a user's class or function makes the rows from the entries of ``files``, which
    need not be paths then (docs/extend/dataset.md).
    """

    files: Sequence[str]
    key: str
    loader: Callable[[Sequence[str]], list[Row]] | None = None

    def read(self) -> list[Row]:
        """Return all rows, in order; raise the errors of ``read_rows``."""
        if self.loader is None:
            return read_rows(self.files, key=self.key)
        return self.loader(self.files)

    def count(self) -> int:
        """Return the number of rows; raise the errors of ``count_rows``."""
        if self.loader is None:
            return count_rows(self.files, key=self.key)
        return len(self.loader(self.files))

    def fault(self, row: int, fault: RowFault) -> UserError:
        """Return the error of row ``row`` of ``read()``, with its file and its number in that file.

        Example:
            >>> source = RowSource(["a.parquet", "b.parquet"], "data.train_files")
            >>> source.fault(7480, RowFault("is empty", "Remove it."))
            UserError("data.train_files='b.parquet': row 7 is empty. Remove it.")
        """
        if self.loader is not None:
            rule = f"row {row} {fault.rule}"
            return UserError(self.key, list(self.files), rule=rule, remedy=fault.remedy)
        for path in _existing(self.files, self.key):
            count = _count_file(path, self.key)
            if row < count:
                rule = f"row {row} {fault.rule}"
                return UserError(self.key, str(path), rule=rule, remedy=fault.remedy)
            row -= count
        raise IndexError(f"{self.key}: the row is {row} rows after the last one")


def count_rows(files: Sequence[str], *, key: str = "data.train_files") -> int:
    """Count the rows of all files.

    Args:
        files: paths; ``~`` is expanded.
        key: the configuration key of ``files``, for messages.

    Raises:
        UserError: there are no files, or one is missing, empty or unreadable.
    """
    return sum(_count_file(path, key) for path in _existing(files, key))


def read_rows(files: Sequence[str], *, key: str = "data.train_files") -> list[Row]:
    """Read all rows of all files, in order. Arguments and errors as in ``count_rows``."""
    return [row for path in _existing(files, key) for row in _read_file(path, key)]


def _existing(files: Sequence[str], key: str) -> Iterator[Path]:
    if not files:
        remedy = f"Set {key}=/path/to/file.parquet."
        raise UserError(key, [], rule="at least one file is needed", remedy=remedy)
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(key, name, rule="no such file", remedy=_remedy(path))
        if not os.access(path, os.R_OK):
            remedy = "Change the file's permissions."
            raise UserError(key, name, rule="the file is not readable", remedy=remedy)
        yield path


def _remedy(path: Path) -> str:
    if "gsm8k" in str(path).lower():
        folder = path.parent
        return f"Create it with: python3 examples/data_preprocess/gsm8k.py --local_dir {folder}"
    return "Check the path. The formats are parquet, .jsonl and .json."


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
        raise UserError(key, str(path), rule="the file has no rows", remedy=_remedy(path))
    return count


def _open_parquet(path: Path, key: str) -> ParquetFile:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            key,
            str(path),
            rule="reading parquet needs pyarrow, which is not installed",
            remedy="Install it with pip install pyarrow, or give a .jsonl file.",
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
    rule = f"not a readable parquet file ({cause})"
    return UserError(key, str(path), rule=rule, remedy=_remedy(path))


def _holds_array(path: Path) -> bool:
    """Return whether a file is one JSON array; otherwise it has one object per line."""
    with path.open("rb") as content:
        return content.read(64).lstrip().startswith(b"[")


def _read_array(path: Path, key: str) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        rule = f"not valid JSON ({error})"
        raise UserError(key, str(path), rule=rule, remedy="Correct the file.") from error
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            rule = f"row {number} is not a JSON object"
            raise UserError(key, str(path), rule=rule, remedy="Correct or remove the row.")
    return rows


def _read_lines(path: Path, key: str) -> list[Row]:
    with path.open("rb") as lines:
        numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    return [_parse_line(line, number, path=path, key=key) for number, line in numbered]


def _parse_line(line: bytes, number: int, *, path: Path, key: str) -> Row:
    remedy = "Correct or remove the line."
    try:
        row = json.loads(line)
    except ValueError as error:
        rule = f"line {number} is not valid JSON ({error})"
        raise UserError(key, str(path), rule=rule, remedy=remedy) from error
    if not isinstance(row, dict):
        rule = f"line {number} is not a JSON object"
        raise UserError(key, str(path), rule=rule, remedy=remedy)
    return row
