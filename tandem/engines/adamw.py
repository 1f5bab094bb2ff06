# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, 2019) through torch's fused kernel.

Not a ``torch.optim.Optimizer``: constructing one imports torch's compiler, which costs a process a
second or more before its first step, and nothing else of that class is needed here. There is one
parameter group; weights, gradients and the rate come with each step, and only moments are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

_EPSILON = 1e-8

Moments = dict[str, list[Tensor]]
"""Tensors by name, one a weight in the order of the weights; empty before the first step."""


class AdamW:
    """Decays all weights alike. Every step must be given the same weights in the same order."""

    def __init__(self, *, betas: tuple[float, float], weight_decay: float) -> None:
        self._betas = betas
        self._weight_decay = weight_decay
        self.moments: Moments = {}

    @torch.no_grad()
    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> None:
        """Update the weights in place."""
        self.moments = self.moments or self.zero_moments(weights)
        adamw(
            list(weights.values()),
            [gradients[name] for name in weights],
            self.moments["exp_avg"],
            self.moments["exp_avg_sq"],
            max_exp_avg_sqs=[],
            state_steps=self.moments["step"],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
            maximize=False,
        )

    def zero_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """What the first step begins with."""
        return {
            "exp_avg": [torch.zeros_like(weight) for weight in weights.values()],
            "exp_avg_sq": [torch.zeros_like(weight) for weight in weights.values()],
            "step": [weight.new_zeros((), dtype=torch.float32) for weight in weights.values()],
        }
