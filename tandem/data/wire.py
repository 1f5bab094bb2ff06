# SPDX-License-Identifier: Apache-2.0
"""Fast pickling of micro-batches for another process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.types import PackedBatch


@dataclass(frozen=True, slots=True)
class SentBatches:
    """Micro-batches for another process, which unpickles them as a list.

    They are pickled as arrays: pickling tensors goes through shared memory and is many times
    slower.
    """

    batches: Sequence[PackedBatch]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (
            _mapped(list(self.batches), Tensor, function=lambda tensor: tensor.numpy()),
        )


def _arrived(batches: list[PackedBatch]) -> list[PackedBatch]:
    # A copy, because the arrays may be read-only views of shared memory.
    return _mapped(batches, np.ndarray, function=lambda array: torch.from_numpy(array.copy()))


def _mapped(value: Any, kind: type, *, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to the values of a kind in nested sequences and dataclasses."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        mapped = [_mapped(part, kind, function=function) for part in value]
        return tuple(mapped) if isinstance(value, tuple) else mapped
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        parts = {name: _mapped(part, kind, function=function) for name, part in held.items()}
        return replace(value, **parts)
    return value
