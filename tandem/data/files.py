# SPDX-License-Identifier: Apache-2.0
"""The rows of local parquet, JSONL and JSON files, several files concatenated in order.

Counting rows reads only the metadata of parquet files. pyarrow is imported when a parquet file is
opened, which keeps the planner light.
"""

from __future__ import annotations

import codecs
import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.errors import UserError

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

Row = dict[str, Any]

_SUFFIXES = (".parquet", ".jsonl", ".json")
_FORMATS = "parquet, .jsonl and .json"
_PREPARED = ("gsm8k", "geo3k")
"""The data sets that ``tandem prepare`` writes."""
_LFS_POINTER = b"version https://git-lfs"


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


def write_parquet(rows: Sequence[Row], path: Path, *, key: str) -> None:
    """Write rows, replacing an older file only once the new one is complete.

    Args:
        key: the option that names the folder, for messages.

    Raises:
        UserError: the file cannot be written, or pyarrow is not installed.
    """
    part = path.with_suffix(".parquet.part")
    try:
        import pyarrow as pa
        from pyarrow import parquet

        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), part)
        part.replace(path)
    except (OSError, ImportError) as error:
        raise UserError(
            key,
            str(path.parent),
            rule=f"{path.name} cannot be written ({error})",
            remedy="Choose another folder, free some space, or install pyarrow.",
        ) from error


def _existing(files: Sequence[str], key: str) -> Iterator[Path]:
    if not files:
        remedy = f"Set {key}=/path/to/file.parquet."
        raise UserError(key, [], rule="at least one file is needed", remedy=remedy)
    for name in files:
        path = Path(os.path.expanduser(name))
        mode = _mode(path, name, key=key)
        if stat.S_ISDIR(mode):
            raise UserError(key, name, rule="is a folder", remedy=_remedy_of_folder(path, key))
        if not stat.S_ISREG(mode):
            raise UserError(key, name, rule="no such file", remedy=_remedy(path))
        if not os.access(path, os.R_OK):
            remedy = "Change the file's permissions."
            raise UserError(key, name, rule="the file is not readable", remedy=remedy)
        yield path


def _mode(path: Path, name: str, *, key: str) -> int:
    """Return what the file system says about a path; 0 if there is nothing."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a zero byte
        return 0
    except OSError as error:
        rule = f"it cannot be found ({error.strerror})"
        raise UserError(key, name, rule=rule, remedy="Check the path.") from error


def _remedy(path: Path) -> str:
    if not path.suffix and len(path.parts) == 2:
        return (
            "Data sets of the hub are not read. Write the columns of docs/data.md into a file; "
            "for GSM8K: tandem prepare gsm8k --output FOLDER."
        )
    for name in _PREPARED:
        if name in str(path).lower():
            return f"Create it with: tandem prepare {name} --output {path.parent}"
    return f"Check the path. The formats are {_FORMATS}."


def _remedy_of_folder(folder: Path, key: str) -> str:
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in _SUFFIXES)
    if not files:
        return f"Name files. The formats are {_FORMATS}."
    return f"Name its files: {key}=[{','.join(map(str, files[:4]))}]."


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
    with path.open("rb") as content:
        begin = content.read(64).lstrip()
    if path.suffix.lower() not in _SUFFIXES:
        rule = f"the format {path.suffix or 'without a suffix'} is not read"
        remedy = f"Convert it to one of {_FORMATS} (docs/data.md)."
    elif begin.startswith(_LFS_POINTER):
        rule, remedy = "is a pointer of Git LFS, not the file itself", "Run git lfs pull there."
    elif begin.startswith((b"{", b"[")):
        suffix = ".jsonl" if begin[:1] == b"{" else ".json"
        rule, remedy = "holds JSON, not parquet", f"Rename it to {path.stem}{suffix}."
    else:
        cause = " ".join(str(error).split())[:200]
        rule, remedy = f"not a readable parquet file ({cause})", _remedy(path)
    return UserError(key, str(path), rule=rule, remedy=remedy)


def _holds_array(path: Path) -> bool:
    """Return whether a file is one JSON array; otherwise it has one object per line."""
    if path.suffix.lower() == ".jsonl":
        return False
    with path.open("rb") as content:
        return content.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(path: Path, key: str) -> list[Row]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
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
    if number == 1 and line.lstrip().startswith(b"["):
        remedy = "Write one object per line, or name a file that is one array .json."
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        rule = f"line {number} is not valid JSON ({error})"
        raise UserError(key, str(path), rule=rule, remedy=remedy) from error
    if not isinstance(row, dict):
        rule = f"line {number} is not a JSON object"
        raise UserError(key, str(path), rule=rule, remedy=remedy)
    return row
