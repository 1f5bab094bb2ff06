# SPDX-License-Identifier: Apache-2.0
"""Rows in memory as files of the run, which a resumed run, the report and other processes read.

The name of a file has a digest of its rows: other rows are another file, and a file that exists is
not written again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tandem.config.schema.data import DataConfig
from tandem.data.files import RowFault, read_rows
from tandem.data.images import in_json
from tandem.data.ledger import permutation
from tandem.errors import UserError

INPUTS_FOLDER = "inputs"
"""The folder in the run folder for files that are made from Python objects."""
IMAGE_KEY: str = DataConfig.model_fields["image_key"].default
"""The column of the pictures unless ``data.image_key`` names another."""
DIGEST_LENGTH = 12
"""The number of characters of a digest in the name of a file."""
Data = Iterable[Mapping[str, Any]] | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SPLIT_SEED = 1


def write_data(
    data: Data, validation: Data | float | None, *, folder: Path, image_key: str = IMAGE_KEY
) -> tuple[list[str], list[str]]:
    """Return the training and the validation files, after writing rows that are in memory.

    Args:
        validation: rows, paths, the share of ``data`` to set aside, or None.
        folder: the run folder.
        image_key: the column of the pictures.

    Raises:
        UserError: a row is not a mapping or holds a value that JSON cannot hold, or the share is
            not between 0 and 1.
    """
    if isinstance(validation, float | int):
        rows = _rows(data, "data")
        chosen = _validation_rows(len(rows), validation)
        parts = {
            "train": [row for number, row in enumerate(rows) if number not in chosen],
            "validation": [rows[number] for number in sorted(chosen)],
        }
        files = [
            _write(part, name, folder=folder, image_key=image_key) for name, part in parts.items()
        ]
        return files[:1], files[1:]
    files: list[str] = []
    if validation is not None:
        files = _files(validation, "validation", folder=folder, image_key=image_key)
    return _files(data, "train", folder=folder, image_key=image_key), files


def write_whole(path: Path, content: bytes) -> None:
    """Write a file below the run folder, completely or not at all.

    Raises:
        UserError: the folder cannot be made, or not be written into.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        os.replace(partial, path)
    except OSError as error:
        raise unwritable(path.parent.parent, error) from error


def unwritable(folder: Path, error: OSError) -> UserError:
    """Return the error of a run folder that cannot be written."""
    return UserError(
        "folder",
        str(folder),
        rule=f"cannot be written ({error.strerror or error})",
        remedy="Name a folder that is yours, or a new one, and leave space on its disk.",
    )


def digest(content: bytes) -> str:
    """Return a short digest for the name of a file."""
    return sha256(content).hexdigest()[:DIGEST_LENGTH]


def _files(data: Data, name: str, *, folder: Path, image_key: str) -> list[str]:
    paths = _paths(data)
    if paths:
        return paths
    return [_write(_rows(data, name), name, folder=folder, image_key=image_key)]


def _paths(data: Data) -> list[str]:
    """Return the paths of files; [] if ``data`` are rows."""
    if isinstance(data, str | os.PathLike):
        return [os.fspath(data)]
    if isinstance(data, list | tuple) and all(isinstance(one, str | os.PathLike) for one in data):
        return [os.fspath(one) for one in data if isinstance(one, str | os.PathLike)]
    return []


def _rows(data: Data, name: str) -> list[Mapping[str, Any]]:
    paths = _paths(data)
    if paths:
        return list(read_rows(paths, key=name))
    remedy = "Give an iterable of dicts or a path, and one split of a dataset, not all of them."
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise UserError(name, rule=f"{type(data).__name__} holds no rows", remedy=remedy)
    rows: list[Mapping[str, Any]] = []
    for number, row in enumerate(data):
        if not isinstance(row, Mapping):
            rule = f"row {number} is {type(row).__name__}, not a mapping"
            raise UserError(name, rule=rule, remedy=remedy)
        rows.append(row)
    if not rows:
        raise UserError(name, rule="has no rows", remedy=remedy)
    return rows


def _validation_rows(num_rows: int, share: float) -> frozenset[int]:
    """Choose rows at random, the same ones in every run."""
    if not 0 < share < 1 or num_rows < 2:
        raise UserError(
            "validation",
            share,
            rule="a share must be between 0 and 1, and leave at least one row to train on",
            remedy="Set validation=0.05, or give rows.",
        )
    number = min(max(round(share * num_rows), 1), num_rows - 1)
    return frozenset(permutation(num_rows, seed=_SPLIT_SEED, epoch=0)[:number].tolist())


def _write(rows: Sequence[Mapping[str, Any]], name: str, *, folder: Path, image_key: str) -> str:
    lines = [
        _line(row, name, number=number, image_key=image_key) for number, row in enumerate(rows)
    ]
    content = b"".join(lines)
    path = folder / INPUTS_FOLDER / f"{name}-{digest(content)}.jsonl"
    if not path.exists():
        write_whole(path, content)
    return str(path)


def _line(row: Mapping[str, Any], name: str, *, number: int, image_key: str) -> bytes:
    try:
        pictures = {image_key: in_json(row[image_key])} if image_key in row else {}
        return json.dumps({**row, **pictures}, default=_plain).encode() + b"\n"
    except RowFault as fault:
        raise UserError(name, rule=f"row {number} {fault}", remedy=fault.remedy) from fault
    except (TypeError, ValueError) as error:
        raise UserError(
            name,
            rule=f"row {number} holds a value that JSON cannot hold ({error})",
            remedy="Convert it to text, numbers, lists or dicts.",
        ) from error


def _plain(value: Any) -> Any:
    """Return the Python value of a NumPy array or scalar, and a mapping as a dict."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} {value!r:.60}")
