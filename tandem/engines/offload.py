# SPDX-License-Identifier: Apache-2.0
"""Parameters of one device that stay in host memory while they are not used.

They remain the same ``nn.Parameter`` objects; only their storage moves. No other tensor may share
that storage, because each offload replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn


class OffloadedParameters:
    """Parameters that are in host memory, except inside ``on_device``."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, frozen: bool = False) -> None:
        """Offload the parameters. Only the first offload copies them if they are ``frozen``."""
        self._parameters = list(parameters)
        self._device = self._parameters[0].device
        self._frozen = frozen
        # The buffers on the host are kept: allocating pinned memory is slow.
        self._hosted = [_host_memory(part) for part in self._parameters]
        self._offload(copies=True)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Onload the parameters for the duration of the context."""
        self._onload()
        try:
            yield
        finally:
            self._offload(copies=not self._frozen)

    @torch.no_grad()
    def _onload(self) -> None:
        for parameter in self._parameters:
            values = torch.empty_like(parameter, device=self._device)
            _set_values(parameter, values.copy_(parameter, non_blocking=True))

    @torch.no_grad()
    def _offload(self, *, copies: bool) -> None:
        for parameter, hosted in zip(self._parameters, self._hosted, strict=True):
            if copies:
                hosted.copy_(parameter)
            _set_values(parameter, hosted)


def on_device(parameters: OffloadedParameters | None) -> AbstractContextManager[None]:
    """Return ``parameters.on_device()``, or a context without effect if nothing is offloaded."""
    return nullcontext() if parameters is None else parameters.on_device()


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


def _host_memory(parameter: Tensor) -> Tensor:
    # Copies from and to pinned memory are several times faster.
    pinned = parameter.device.type != "cpu"
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=pinned)
