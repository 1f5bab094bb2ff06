# SPDX-License-Identifier: Apache-2.0
"""The choice of the rows that are used, and the truncation of rows that are too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.config.schema.sft import SftDataConfig
from tandem.data.files import Row, RowSource
from tandem.data.ledger import permutation


@dataclass(frozen=True, slots=True)
class UsedRows:
    """The rows to use by their number within all files together, and their source."""

    source: RowSource
    rows: dict[int, Row]


def read_used_rows(config: DataConfig | SftDataConfig, *, validation: bool) -> UsedRows:
    """Read the training or the validation rows, at most ``*_max_samples`` of them.

    Without validation files there are no validation rows.

    Raises:
        UserError: a file cannot be read, or there is no training file.
    """
    if not validation:
        source = RowSource(config.train_files, "data.train_files")
        max_samples = config.train_max_samples
    elif config.val_files:
        source = RowSource(config.val_files, "data.val_files")
        max_samples = config.val_max_samples
    else:
        return UsedRows(RowSource((), "data.val_files"), {})
    rows = source.read()
    chosen = choose_rows(len(rows), max_samples, shuffle=config.shuffle, seed=config.seed)
    return UsedRows(source, {number: rows[number] for number in chosen})


def choose_rows(num_rows: int, max_samples: int, *, shuffle: bool, seed: int) -> list[int]:
    """Choose ``max_samples`` rows, at random with ``shuffle`` and else the first; ascending.

    All rows are chosen if ``max_samples`` is not positive, or not below their number.
    """
    if max_samples <= 0 or max_samples >= num_rows:
        return list(range(num_rows))
    if not shuffle:
        return list(range(max_samples))
    return sorted(permutation(num_rows, seed=seed, epoch=0)[:max_samples].tolist())


def truncate(tokens: np.ndarray, limit: int, *, side: str) -> np.ndarray:
    """Truncate tokens to at most ``limit``.

    Args:
        side: the side that is cut off. ``left`` keeps the last tokens and ``right`` the first;
            ``middle`` keeps the first ``limit // 2`` and fills up with the last.
    """
    if len(tokens) <= limit:
        return tokens
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    if side == "middle":
        head = limit // 2
        return np.concatenate([tokens[:head], tokens[head - limit :]])
    raise ValueError(f"unknown side {side!r}")
