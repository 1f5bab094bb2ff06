# SPDX-License-Identifier: Apache-2.0
"""Parameters of one device that stay in host memory while they are not used.

They remain the same ``nn.Parameter`` objects; only their storage moves. No other tensor may share
that storage, because each offload replaces it. Copies are queued: ``wait`` before the host reads.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from tandem.platforms.page_locked import page_locked_zeros

_LARGEST_PIECE = 1 << 32
_ALIGNMENT = 256
"""In bytes, of each tensor in a piece."""


class HostMemory:
    """Memory of the host for many tensors, in few pieces, which a thread allocates.

    Page-locked memory is copied several times faster. Most platforms round each allocation of it to
    a power of two, which would take twice as much for most tensors. A file of such tensors has
    whole pieces, which are therefore no larger than needed.

    The thread stops when all pieces are allocated or one is refused. If this object is freed or the
    process ends, it stops after the current piece.
    """

    def __init__(self, sizes: Iterable[int], *, device: torch.device) -> None:
        """Begin to allocate memory for tensors of these bytes, in the order in which they come.

        Args:
            device: the device that copies.
        """
        self._device = device
        self._pieces: list[Future[Tensor]] = []
        self._lengths: list[int] = []
        self._used: list[int] = []
        aligned = [_aligned(size) for size in sizes]
        self._piece_bytes = min(_LARGEST_PIECE, sum(aligned))
        for size in aligned:
            self._reserve(size)
        self._used = [0] * len(self._pieces)  # the tensors will take the same places
        is_freed = threading.Event()
        weakref.finalize(self, is_freed.set)
        pieces = list(zip(self._pieces, self._lengths, strict=True))
        threading.Thread(
            target=_allocate_all,
            args=(pieces, device),
            kwargs={"is_freed": is_freed},
            name="host_memory",
        ).start()

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros of the same shape on the host, in ``dtype`` if given. Wait for their memory.

        Raises:
            RuntimeError: the host has too little memory.
        """
        dtype = tensor.dtype if dtype is None else dtype
        num_bytes = tensor.numel() * dtype.itemsize
        num_pieces = len(self._pieces)
        index, begin = self._reserve(_aligned(num_bytes))
        if index == num_pieces:  # there is more than the sizes said
            added = [(self._pieces[index], self._lengths[index])]
            _allocate_all(added, self._device, is_freed=threading.Event())
        piece = self._pieces[index].result()
        return piece[begin : begin + num_bytes].view(dtype).view(tensor.shape)

    def _reserve(self, num_bytes: int) -> tuple[int, int]:
        """Return the first piece with room, which may be one to allocate, and the offset there."""
        for index, (length, used) in enumerate(zip(self._lengths, self._used, strict=True)):
            if used + num_bytes <= length:
                self._used[index] += num_bytes
                return index, used
        self._pieces.append(Future())
        self._lengths.append(max(self._piece_bytes, num_bytes))
        self._used.append(num_bytes)
        return len(self._pieces) - 1, 0


def _allocate_all(
    pieces: Sequence[tuple[Future[Tensor], int]],
    device: torch.device,
    *,
    is_freed: threading.Event,
) -> None:
    """Give each piece its memory, or the error that ended this: nobody waits for ever."""
    ended: Exception = RuntimeError("the thread that allocates memory of the host has ended")
    try:
        if device.type != "cpu" and device.index is not None:
            torch.accelerator.set_device_index(device)  # a new thread begins with the first one
        for piece, num_bytes in pieces:
            if is_freed.is_set() or not threading.main_thread().is_alive():
                return
            piece.set_result(page_locked_zeros(num_bytes, device_type=device.type))
    except (RuntimeError, MemoryError) as error:
        ended = error
    finally:
        for piece, _ in pieces:
            if not piece.done():
                piece.set_exception(ended)


def _aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor takes in a piece."""
    return max(1, -(-num_bytes // _ALIGNMENT)) * _ALIGNMENT


class OffloadedParameters:
    """Parameters that are in host memory, except inside ``on_device``."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, frozen: bool = False) -> None:
        """Offload the parameters. Only the first offload copies them if they are ``frozen``."""
        self._parameters = list(parameters)
        self._device = self._parameters[0].device
        self._frozen = frozen
        # The buffers on the host are kept: allocating page-locked memory is slow.
        sizes = [part.nbytes for part in self._parameters]
        memory = HostMemory(sizes, device=self._device)
        self._hosted: list[Tensor] = []
        for index, part in enumerate(self._parameters):
            self._hosted.append(memory.zeros_like(part))
            self._offload(slice(index, index + 1), copies=True)
        self.wait()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Onload the parameters for the duration of the context."""
        self.place(slice(None), [self._copied(part) for part in self._parameters])
        try:
            yield
        finally:
            self._offload(slice(None), copies=not self._frozen)

    def hosted(self, chosen: slice) -> list[Tensor]:
        """Return the values of consecutive parameters in host memory."""
        return self._hosted[chosen]

    @torch.no_grad()
    def place(self, chosen: slice, values: Sequence[Tensor]) -> None:
        """Let consecutive parameters have ``values``, which share their memory from now on."""
        for parameter, value in zip(self._parameters[chosen], values, strict=True):
            _set_values(parameter, value)

    def wait(self) -> None:
        """Wait until the host's memory has all values."""
        wait_for(self._device)

    @torch.no_grad()
    def _copied(self, parameter: nn.Parameter) -> Tensor:
        values = torch.empty_like(parameter, device=self._device)
        return values.copy_(parameter, non_blocking=True)

    @torch.no_grad()
    def _offload(self, chosen: slice, *, copies: bool) -> None:
        pairs = zip(self._parameters[chosen], self._hosted[chosen], strict=True)
        for parameter, hosted in pairs:
            if copies:
                hosted.copy_(parameter, non_blocking=True)
            _set_values(parameter, hosted)


def on_device(parameters: OffloadedParameters | None) -> AbstractContextManager[None]:
    """Return ``parameters.on_device()``, or a context without effect if nothing is offloaded."""
    return nullcontext() if parameters is None else parameters.on_device()


def wait_for(device: torch.device) -> None:
    """Wait for the work that is queued on ``device``."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _set_values(parameter: nn.Parameter, values: Tensor) -> None:
    # ``data`` accepts only tensors of the same kind. The kinds of the host and of an out-of-tree
    # backend differ: the whole tensor is swapped.
    is_same_kind = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
    if is_same_kind(parameter, values):
        parameter.data = values
    else:
        torch.utils.swap_tensors(
            parameter, nn.Parameter(values, requires_grad=parameter.requires_grad)
        )
