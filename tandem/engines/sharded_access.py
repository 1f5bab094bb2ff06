# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints for one process that may meet some: the way to ``sharded``, which loads
torch's distributed checkpoints, a second of imports, when there is one to read and not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from tandem.engines.optim import PolicyOptimizer
from tandem.models.parallel import Boxes


def restore(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    optimizer: PolicyOptimizer,
    boxes: Mapping[str, Boxes],
    model: str,
) -> int:
    """See ``sharded.restore``."""
    return _sharded().restore(folder, weights, optimizer=optimizer, boxes=boxes, model=model)


def export_sharded(source: Path, folder: Path, *, dtype: str | None = None) -> None:
    """See ``sharded.export_sharded``."""
    _sharded().export_sharded(source, folder, dtype=dtype)


def _sharded():
    from tandem.engines import sharded

    return sharded
