# SPDX-License-Identifier: Apache-2.0
"""The lengths of the prompts of a large data set, kept on disk for the next start.

``data.filter_overlong_prompts`` needs the length of every prompt before the first step, as it
decides the number of rows and with it their order. The file depends on the contents of all rows,
the tokenizer and the chat template, and is made again if any of them changes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from huggingface_hub import constants

from tandem.data.ledger import fingerprint
from tandem.data.rendering import PromptRow

logger = logging.getLogger(__name__)


def kept_lengths(
    rows: Sequence[PromptRow],
    measure: Callable[[Sequence[PromptRow]], np.ndarray],
    *,
    key: str | None,
) -> np.ndarray:
    """Return the length of each prompt in tokens, int32, from the file of an earlier start if any.

    Args:
        measure: returns the lengths by tokenising all rows.
        key: the identity of tokenizer and template; None if lengths must not be kept.
    """
    path = None if key is None else _path(rows, key)
    found = None if path is None else _read(path, len(rows))
    if found is not None:
        logger.info("the lengths of %d prompts are read from %s", len(rows), path)
        return found
    logger.info(
        "measuring %d prompts, because data.filter_overlong_prompts=True needs their lengths",
        len(rows),
    )
    begin_s = time.monotonic()
    lengths = measure(rows)
    logger.info("measured in %.0f s", time.monotonic() - begin_s)
    if path is not None:
        _write(path, lengths)
    return lengths


def _path(rows: Sequence[PromptRow], key: str) -> Path:
    digest = hashlib.sha256(f"{key} {fingerprint(row.content for row in rows)}".encode())
    return Path(constants.HF_HOME) / "tandem" / "prompt_lengths" / f"{digest.hexdigest()}.npy"


def _read(path: Path, num_rows: int) -> np.ndarray | None:
    """Return the lengths of a file; None if it is missing or damaged."""
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    is_ours = lengths.dtype == np.int32 and lengths.shape == (num_rows,)
    return lengths if is_ours else None


def _write(path: Path, lengths: np.ndarray) -> None:
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            np.save(file, lengths)
        partial.replace(path)
        logger.info("the lengths are kept for the next start in %s", path)
    except OSError as error:
        logger.warning("the lengths cannot be kept for the next start: %s", error)
        with suppress(OSError):
            partial.unlink()
