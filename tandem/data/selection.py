# SPDX-License-Identifier: Apache-2.0
"""The choice of the rows to use, and the truncation of long token sequences."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.config.schema.imports import import_object
from tandem.config.schema.sft import SftDataConfig
from tandem.data.files import Row, RowSource
from tandem.data.ledger import permutation
from tandem.errors import UserError

_CUSTOM = "data.custom_cls"


@dataclass(frozen=True, slots=True)
class UsedRows:
    """The rows to use by their number, counted over all files, and their source."""

    source: RowSource
    rows: dict[int, Row]


def read_used_rows(config: DataConfig | SftDataConfig, *, validation: bool) -> UsedRows:
    """Read at most ``*_max_samples`` training or validation rows; none without validation files.

    Raises:
        UserError: a file cannot be read, or there is no training file.
    """
    source = row_source(config, validation=validation)
    if validation and not source.files:
        return UsedRows(source, {})
    max_samples = config.val_max_samples if validation else config.train_max_samples
    rows = source.read()
    chosen = choose_rows(len(rows), max_samples, shuffle=config.shuffle, seed=config.seed)
    return UsedRows(source, {number: rows[number] for number in chosen})


def row_source(config: DataConfig | SftDataConfig, *, validation: bool) -> RowSource:
    """Return the source of the training or the validation rows.

    Raises:
        UserError: the class of ``data.custom_cls`` cannot be imported.
    """
    custom = config.custom_cls
    loader = None
    if custom.path is not None:
        factory = import_object(_CUSTOM, custom.path, name=custom.name)
        loader = partial(_custom_rows, factory, config=config)
    if validation:
        return RowSource(config.val_files, "data.val_files", loader)
    return RowSource(config.train_files, "data.train_files", loader)


def _custom_rows(
    factory: Callable[..., Any], files: Sequence[str], *, config: DataConfig | SftDataConfig
) -> list[Row]:
    """Return the rows that a user's class or function makes."""
    try:
        inspect.signature(factory).bind(data_files=list(files), config=config)
    except TypeError as error:
        raise UserError(
            f"{_CUSTOM}.path",
            config.custom_cls.path,
            rule=f"{factory.__name__} cannot be called with data_files and config: {error}",
            remedy="Change its parameters. It gets no tokenizer, because tandem tokenises rows.",
        ) from error
    made = factory(data_files=list(files), config=config)
    if not hasattr(made, "__iter__") and hasattr(made, "__getitem__") and hasattr(made, "__len__"):
        made = [made[index] for index in range(len(made))]
    if not hasattr(made, "__iter__"):
        raise _wrong_rows(factory, f"returned {type(made).__name__}, not rows", config=config)
    rows = [dict(row) if isinstance(row, Mapping) else row for row in made]
    wrong = next((index for index, row in enumerate(rows) if not isinstance(row, dict)), None)
    if wrong is not None or not rows:
        fault = "made no rows" if not rows else f"made row {wrong}, which is not a mapping"
        raise _wrong_rows(factory, fault, config=config)
    return rows


def _wrong_rows(
    factory: Callable[..., Any], fault: str, *, config: DataConfig | SftDataConfig
) -> UserError:
    return UserError(
        f"{_CUSTOM}.path",
        config.custom_cls.path,
        rule=f"{factory.__name__} {fault}",
        remedy="Return mappings of verl's schema.",
    )


def choose_rows(num_rows: int, max_samples: int, *, shuffle: bool, seed: int) -> list[int]:
    """Choose ``max_samples`` rows, at random with ``shuffle``, else the first ones; ascending.

    Choose all rows if ``max_samples`` is not positive, or not less than ``num_rows``.
    """
    if max_samples <= 0 or max_samples >= num_rows:
        return list(range(num_rows))
    if not shuffle:
        return list(range(max_samples))
    return sorted(permutation(num_rows, seed=seed, epoch=0)[:max_samples].tolist())


def truncate(tokens: np.ndarray, limit: int, *, side: str) -> np.ndarray:
    """Truncate tokens to at most ``limit``.

    Args:
        side: the side to remove. ``left`` keeps the last tokens and ``right`` the first; ``middle``
            keeps the first ``limit // 2`` and the last of the rest.
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
