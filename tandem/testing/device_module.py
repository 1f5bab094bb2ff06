# SPDX-License-Identifier: Apache-2.0
"""The module ``torch.<device type>`` of a double.

It has the functions that torch, FSDP2 and tandem call. Any other call is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Device = torch.device | str | int | None


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The properties of a device. ``uuid`` does not depend on the process or the index."""

    name: str
    uuid: str
    total_memory: int
    multi_processor_count: int = 1
    major: int = 1
    minor: int = 0


class DeviceModule(ModuleType):
    """The module ``torch.<device type>`` of a double.

    Args:
        extension: the result of ``compiling.open_extension``.
        physical_ids: the names of the devices that this process sees, by index.
    """

    def __init__(
        self, device_type: str, extension: ModuleType, *, physical_ids: Sequence[str]
    ) -> None:
        super().__init__(f"torch.{device_type}", "A vendor's device, computed by the host.")
        self._type = device_type
        self._extension: Any = extension
        self._physical_ids = tuple(physical_ids)
        self.device_count: Callable[[], int] = self._extension.device_count
        self.current_device: Callable[[], int] = self._extension.current_device
        self.Stream = _stream_class(device_type)
        self.Event = torch.Event

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        return None

    def _is_in_bad_fork(self) -> bool:
        return False

    def set_device(self, device: Device) -> None:
        self._extension.set_device(self._index(device))

    @contextmanager
    def device(self, device: Device) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self, device: Device = None) -> None:
        self._index(device)

    def get_device_name(self, device: Device = None) -> str:
        return f"double of {self._type} ({self._physical_ids[self._index(device)]})"

    def get_device_capability(self, device: Device = None) -> None:
        return None

    def get_device_properties(self, device: Device = None) -> DeviceProperties:
        uuid = f"double-{self._type}-{self._physical_ids[self._index(device)]}"
        return DeviceProperties(self.get_device_name(device), uuid, self._extension.total_memory())

    def is_bf16_supported(self) -> bool:
        return True

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def stream(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else stream

    def current_stream(self, device: Device = None) -> torch.Stream:
        return self._named(torch.accelerator.current_stream(self._index(device)))

    def default_stream(self, device: Device = None) -> torch.Stream:
        index = self._index(device)
        kind = torch.accelerator.current_stream(index).device_type
        return self.Stream(stream_id=0, device_index=index, device_type=kind)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def memory_allocated(self, device: Device = None) -> int:
        return self._extension.memory_allocated(self._index(device))

    def max_memory_allocated(self, device: Device = None) -> int:
        return self._extension.max_memory_allocated(self._index(device))

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Device = None) -> None:
        self._extension.reset_peak_memory(self._index(device))

    def mem_get_info(self, device: Device = None) -> tuple[int, int]:
        total = self._extension.total_memory()
        return total - self.memory_allocated(device), total

    def empty_cache(self) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        # Random numbers come from the host's generator. torch.manual_seed calls this method, so
        # this method must not call it.
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Device = None) -> Tensor:
        self._index(device)
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: Device = None) -> None:
        self._index(device)
        torch.default_generator.set_state(state)

    def _index(self, device: Device) -> int:
        if isinstance(device, int):
            index = device
        else:
            index = None if device is None else torch.device(device).index
        index = self.current_device() if index is None else index
        if not 0 <= index < self.device_count():
            raise RuntimeError(f"invalid device ordinal {index}: there are {self.device_count()}")
        return index

    def _named(self, stream: torch.Stream) -> torch.Stream:
        return self.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )


def _stream_class(device_type: str) -> type[torch.Stream]:
    """Make a class of streams whose raw handle has the vendor's attribute name."""
    handle = property(lambda stream: stream.stream_id, doc="The stand-in for the raw stream.")
    return type("Stream", (torch.Stream,), {f"{device_type}_stream": handle})
