# SPDX-License-Identifier: Apache-2.0
"""Files of one JSON object per line, each with a ``step``, such as ``metrics.jsonl``.

Files are appended to, and truncated on resume. Steps never decrease along a file, except that a
validation is recorded when it ends, perhaps some steps later. A line has left the process when
``append`` returns (there is no fsync). Readers ignore an unfinished last line, and reopening
removes it. Numbers that are not finite are written as null.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.types import StepReport

METRICS_FILE = "metrics.jsonl"
BEFORE_FIRST_STEP = -1
"""The last step of an empty file; step 0 is the validation before training."""


class JsonLinesFile:
    """A file of records, open for appending."""

    def __init__(self, path: Path, *, keep_through_step: int) -> None:
        """Open ``path`` and remove the records of steps after ``keep_through_step``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        truncate_after(path, keep_through_step)
        self._stream = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record completely or not at all. Raise OSError if the disk is full."""
        line = encode(record).encode("ascii") + b"\n"
        begin = self._stream.tell()
        if self._stream.write(line) != len(line):
            self._stream.truncate(begin)
            self._stream.seek(begin)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._stream.name)

    def close(self) -> None:
        """Close the file; idempotent."""
        self._stream.close()


class JsonlSink:
    """The ``tandem.api.MetricSink`` that writes lines ``{"step": 3, "actor/lr": ...}``."""

    def __init__(self, run_folder: Path, *, keep_through_step: int) -> None:
        self._file = JsonLinesFile(run_folder / METRICS_FILE, keep_through_step=keep_through_step)

    def write(self, report: StepReport) -> None:
        metrics = {name: float(value) for name, value in report.metrics.items()}
        self._file.append({"step": report.step, **metrics})

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def encode(record: Mapping[str, Any]) -> str:
    """Format a record as one line of strict ASCII JSON; other types are converted by ``str``."""
    return json.dumps(_finite(record), ensure_ascii=True, allow_nan=False, default=str)


def truncate_after(path: Path, step: int, *, aside: Path | None = None) -> None:
    """Remove all records after ``step``, and an unfinished line.

    Args:
        aside: the new file to write the removed records to; it is not made if there are none.
    """
    if not path.exists():
        return
    size, late, later = 0, b"", b""
    with path.open("rb") as stream:
        for line in stream:
            record = _decode(line)
            if record is None:
                rest = stream.read()
                later += line + rest if rest else b""
                break
            if _step_of(record, default=step) > step:
                later += line
            elif later:
                late += line
            else:
                size += len(line)
    if later and aside is not None:
        aside.parent.mkdir(exist_ok=True)
        aside.write_bytes(later)
    if size < path.stat().st_size:
        with path.open("r+b") as stream:
            stream.seek(size)
            stream.write(late)  # before truncating, so that a kill loses no record
            stream.truncate()


def _step_of(record: Mapping[str, Any], *, default: int) -> int:
    """Return the step of a record, or the default if it has none that is a number."""
    step = record.get("step")
    return step if isinstance(step, int) else default


def last_step(path: Path) -> int:
    """Return the largest step of a file, ``BEFORE_FIRST_STEP`` without one.

    The last record may have a smaller step: the validation of an earlier checkpoint. Raise
    UserError as ``read_records`` does.
    """
    steps = (record.get("step") for record in read_records(path))
    return max((step for step in steps if isinstance(step, int)), default=BEFORE_FIRST_STEP)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read all records of a file, which may still be growing; [] if there is no file.

    Raises:
        UserError: a line before the last one is not a JSON object, or the path is a folder.
    """
    if not path.exists():
        return []
    if not path.is_file():
        raise UserError(str(path), rule="is not a file", remedy="Move it away.")
    lines = path.read_bytes().splitlines(keepends=True)
    records = [_decode(line) for line in lines]
    if records and records[-1] is None:
        records.pop()
    if None in records:
        number = records.index(None) + 1
        raise UserError(
            str(path),
            rule=f"line {number} is not a JSON object",
            remedy="Remove that line, or the file.",
        )
    return [record for record in records if record is not None]


def _decode(line: bytes) -> dict[str, Any] | None:
    """Parse one line; return None if it is unfinished or not a JSON object."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
