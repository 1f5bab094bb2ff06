# SPDX-License-Identifier: Apache-2.0
"""Parameters that leave the device while nothing computes with them, on one device.

They stay the same objects; what they hold lies in the host's memory or in new memory of the device.
Nobody else may share their storage: it is another one after each rest.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class RestingParameters:
    """Awake at first."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, frozen: bool = False) -> None:
        """Take over parameters of one device.

        Args:
            frozen: they never change, so that only their first rest copies them.
        """
        self._parameters = list(parameters)
        self._home = self._parameters[0].device
        self._frozen = frozen
        self._hosted: list[Tensor] | None = None
        self._is_awake = True

    @torch.no_grad()
    def rest(self) -> None:
        """Move to the host's memory, which is kept for the next time."""
        if not self._is_awake:
            return
        is_first = self._hosted is None
        hosted = self._hosted or [_host_memory(part) for part in self._parameters]
        for parameter, target in zip(self._parameters, hosted, strict=True):
            if is_first or not self._frozen:
                target.copy_(parameter)
            _hold(parameter, target)
        self._hosted = hosted
        self._is_awake = False

    @torch.no_grad()
    def wake(self) -> None:
        """Move back to the device."""
        if self._is_awake:
            return
        for parameter in self._parameters:
            awake = torch.empty_like(parameter, device=self._home)
            _hold(parameter, awake.copy_(parameter, non_blocking=True))
        self._is_awake = True


def _hold(parameter: nn.Parameter, values: Tensor) -> None:
    """Torch replaces the data of a plug-in's tensor only by data of that plug-in: there the whole
    tensor behind the object is exchanged."""
    is_same_kind = torch._has_compatible_shallow_copy_type  # pyright: ignore[reportPrivateImportUsage]
    if is_same_kind(parameter, values):
        parameter.data = values
    else:
        torch.utils.swap_tensors(
            parameter, nn.Parameter(values, requires_grad=parameter.requires_grad)
        )


def _host_memory(parameter: Tensor) -> Tensor:
    """Pinned, from and to which accelerators copy several times as fast."""
    pinned = parameter.device.type != "cpu"
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=pinned)
