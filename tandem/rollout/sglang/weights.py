# SPDX-License-Identifier: Apache-2.0
"""The delivery of weights to SGLang through its own loader, by their names in checkpoint files.

Tensors pass through memory that this process shares with SGLang's, several at a time. The sink
checks names in both directions: each tensor of the manifest must arrive, and each parameter of
SGLang's model must be written as a whole (``scheduler``).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.api import EngineFailure
from tandem.rollout.glm_network import name_in_glm
from tandem.types import SliceSpec

_MIN_BYTES = 64 << 20
_ALIGNMENT = 64


class Caller(Protocol):
    """Runs a call in SGLang's process."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run the call and return its result."""
        ...


class SharedMemory:
    """Memory that a child process maps by its descriptor. It has no name and leaves no file.

    Attributes:
        fd: the descriptor.
        num_bytes: the size.
    """

    def __init__(self, manifest: Sequence[SliceSpec]) -> None:
        """Allocate room for the largest tensor."""
        sizes = (torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in manifest)
        self.num_bytes = max(_MIN_BYTES, *sizes)
        self.fd = os.memfd_create("tandem-weights")
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor; the memory goes with its last user."""
        os.close(self.fd)


class SglangSink:
    """An ``api.WeightSink`` over SGLang's process, for a model of ``family``."""

    def __init__(
        self,
        caller: Caller,
        manifest: Sequence[SliceSpec],
        *,
        family: str,
        memory: SharedMemory,
        keeps_cache: bool,
        on_end: Callable[[int], None],
    ) -> None:
        self._caller, self._manifest, self._memory = caller, manifest, memory
        self._family = family
        self._keeps_cache, self._on_end = keeps_cache, on_end
        self._missing: dict[str, SliceSpec] = {}
        self._placed: list[dict[str, Any]] = []
        self._used = 0
        self._version = -1

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the tensors of a version."""
        return self._manifest

    def begin(self, version: int) -> None:
        """Open SGLang's model for new weights. Unfinished sequences wait."""
        self._version = version
        self._missing = {spec.name: spec for spec in self._manifest}
        self._placed, self._used = [], 0
        self._caller.call("begin", {"keeps_cache": self._keeps_cache})

    def take(self, name: str, tensor: Tensor) -> None:
        """Put one tensor into the shared memory, and load what lies there if it is full."""
        if name not in self._missing:
            raise EngineFailure(f"SGLang: weight {name} came twice, or is not in the manifest")
        spec = self._missing.pop(name)
        data = tensor.detach().to("cpu", spec.dtype).contiguous().view(-1).view(torch.uint8)
        if self._used + data.numel() > self._memory.num_bytes:
            self._flush()
        self._memory.bytes[self._used : self._used + data.numel()].copy_(data)
        dtype = str(spec.dtype).removeprefix("torch.")
        named = name_in_glm(name, self._family)
        place = {"name": named, "dtype": dtype, "shape": list(spec.shape), "offset": self._used}
        self._placed.append(place)
        self._used += -(-data.numel() // _ALIGNMENT) * _ALIGNMENT

    def end(self) -> None:
        """Close the model. Raise EngineFailure unless all of it is new."""
        if self._missing:
            raise EngineFailure(f"SGLang: weights are missing: {_some(list(self._missing))}")
        self._flush()
        closing = {"version": str(self._version), "keeps_cache": self._keeps_cache}
        account = self._caller.call("end", closing)
        if account["errors"]:
            raise EngineFailure(f"SGLang did not load {account['errors'][0]}")
        if account["unwritten"]:
            raise EngineFailure(
                f"SGLang: parameters were not written: {_some(account['unwritten'])}"
            )
        self._on_end(self._version)

    def _flush(self) -> None:
        if self._placed:
            self._caller.call("take", {"tensors": self._placed})
        self._placed, self._used = [], 0


def _some(names: Sequence[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > len(shown) else "")
