# SPDX-License-Identifier: Apache-2.0
"""The gradients of an optimizer step, summed over micro-batches in the stored weights' precision.

Linear maps and the head add their products to the sums directly. Other gradients are added as soon
as the backward pass has computed them, and freed: the gradients of all weights in the precision of
the passes never exist at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tandem.models.gradient_sum import GradientSum
from tandem.models.operators import Operators


class GradientSums:
    """The sums of the gradients of some weights, which do not keep gradients themselves."""

    def __init__(
        self,
        computed: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        *,
        operators: Operators,
    ) -> None:
        """Sum the gradients of every backward pass from now on.

        Args:
            computed: the weights of the passes.
            dtypes: the precision of each sum.
            operators: the set whose ``add_into`` and ``add_product`` add to the sums.
        """
        self._sums = {
            name: GradientSum(
                weight,
                dtypes[name],
                add_into=operators.add_into,
                add_product=operators.add_product,
            )
            for name, weight in computed.items()
            if weight.requires_grad
        }

    def begin(self) -> None:
        """Allocate sums of zeros before the passes; activations could take their memory."""
        for one in self._sums.values():
            one.begin()

    def totals(self) -> dict[str, Tensor]:
        """Return the sums since ``begin``, by name."""
        return {name: one.total for name, one in self._sums.items()}

    def drop(self) -> None:
        """Free the sums."""
        for one in self._sums.values():
            one.drop()
