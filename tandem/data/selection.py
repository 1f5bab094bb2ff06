# SPDX-License-Identifier: Apache-2.0
"""Which rows of a data set are used, and which tokens of a row that is too long."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.config.schema.sft import SftDataConfig
from tandem.data.files import Row, RowSource
from tandem.data.ledger import permutation


@dataclass(frozen=True, slots=True)
class UsedRows:
    """The rows to use by their number within all files together, and where they came from."""

    source: RowSource
    rows: dict[int, Row]


def read_used_rows(config: DataConfig | SftDataConfig, *, validation: bool) -> UsedRows:
    """The rows of the training or the validation files, at most ``*_max_samples`` of them.

    Raises:
        UserError: a file cannot be read, or there is no training file. No validation file is fine.
    """
    if not validation:
        source, max_samples = (
            RowSource(config.train_files, "data.train_files"),
            config.train_max_samples,
        )
    elif config.val_files:
        source, max_samples = RowSource(config.val_files, "data.val_files"), config.val_max_samples
    else:
        return UsedRows(RowSource((), "data.val_files"), {})
    rows = source.read()
    chosen = choose_rows(len(rows), max_samples, shuffle=config.shuffle, seed=config.seed)
    return UsedRows(source, {number: rows[number] for number in chosen})


def choose_rows(num_rows: int, max_samples: int, *, shuffle: bool, seed: int) -> list[int]:
    """Rows to use, ascending: ``max_samples`` of them, at random if ``shuffle`` and else the first.

    All of them if ``max_samples`` is not positive or not reached.
    """
    if max_samples <= 0 or max_samples >= num_rows:
        return list(range(num_rows))
    if not shuffle:
        return list(range(max_samples))
    return sorted(permutation(num_rows, seed=seed, epoch=0)[:max_samples].tolist())


def truncate(tokens: np.ndarray, limit: int, *, side: str) -> np.ndarray:
    """At most ``limit`` of the tokens: the last (``left``), the first (``right``), or the first
    ``limit // 2`` and as many of the last as there is room for (``middle``)."""
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
