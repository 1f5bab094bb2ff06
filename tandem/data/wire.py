# SPDX-License-Identifier: Apache-2.0
"""Micro-batches on their way to another process. How they get there is the runtime's."""

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
    """Micro-batches on their way to another process, where they arrive as a list of them.

    Pickled as arrays: tensors are pickled by way of files in memory, which takes many times as
    long.
    """

    batches: Sequence[PackedBatch]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (_mapped(self.batches, Tensor, function=lambda tensor: tensor.numpy()),)


def _arrived(batches: list[PackedBatch]) -> list[PackedBatch]:
    """With memory of their own: that of the sender's arrays may be shared, and then is sealed."""
    return _mapped(batches, np.ndarray, function=lambda array: torch.from_numpy(array.copy()))


def _mapped(value: Any, kind: type, *, function: Callable[[Any], Any]) -> Any:
    """Whatever is of ``kind`` in a nest of sequences and dataclasses through ``function``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Sequence):
        return [_mapped(part, kind, function=function) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value)}
        parts = {name: _mapped(part, kind, function=function) for name, part in held.items()}
        return replace(value, **parts)
    return value
