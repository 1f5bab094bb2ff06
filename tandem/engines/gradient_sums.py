# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer step, summed over micro-batches in the stored weights' precision.

A gradient is added as soon as the backward pass has computed it, and freed: the gradients of all
weights in the precision of the passes never exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn


class GradientSums:
    """The sums of the gradients of some weights, which do not keep gradients themselves.

    It does not refer to the weights, whose hooks refer to it.
    """

    def __init__(
        self,
        computed: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        *,
        add_into: Callable[[Tensor, Tensor], object],
    ) -> None:
        """Sum the gradients of every backward pass from now on.

        Args:
            computed: the weights of the passes.
            dtypes: the precision of each sum.
            add_into: adds a gradient to a sum in place.
        """
        trained = {name: one for name, one in computed.items() if one.requires_grad}
        self._devices = {name: one.device for name, one in trained.items()}
        self._sizes = {
            name: torch.empty_like(one, dtype=dtypes[name], device="meta")
            for name, one in trained.items()
        }
        self._add_into = add_into
        self._sums: dict[str, Tensor] = {}
        self._begun: set[str] = set()
        for name, parameter in trained.items():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    def allocate(self) -> None:
        """Allocate the sums. Memory for them would be taken from that of activations otherwise."""
        self._sums = {
            name: torch.empty_like(size, device=self._devices[name])
            for name, size in self._sizes.items()
        }

    def get(self, name: str) -> Tensor | None:
        """Return a sum; None if the weight has had no gradient."""
        return self._sums[name] if name in self._begun else None

    def drop(self) -> None:
        """Free the sums."""
        self._sums, self._begun = {}, set()

    @torch.no_grad()
    def _add(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "the hook follows a gradient"
        if name in self._begun:
            self._add_into(self._sums[name], gradient)
        else:
            self._sums[name].copy_(gradient)
            self._begun.add(name)
        parameter.grad = None
