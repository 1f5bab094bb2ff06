# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, 2019) through torch's fused kernel.

Not a ``torch.optim.Optimizer``: constructing one imports torch's compiler, which costs a process a
second or more before its first step, and nothing else of that class is needed here. There is one
parameter group, and the rate comes with each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

_EPSILON = 1e-8

Moments = dict[str, list[Tensor]]
"""Tensors by name, one a parameter in the order of the parameters; empty before the first step."""


class AdamW:
    """Decays all parameters alike. Every parameter must have a gradient when a step is taken."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._parameters = list(parameters)
        self._betas = betas
        self._weight_decay = weight_decay
        self.moments: Moments = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the parameters from their gradients."""
        self.moments = self.moments or self._zero_moments()
        adamw(
            list[Tensor](self._parameters),
            [gradient_of(parameter) for parameter in self._parameters],
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

    def _zero_moments(self) -> Moments:
        return {
            "exp_avg": [torch.zeros_like(parameter) for parameter in self._parameters],
            "exp_avg_sq": [torch.zeros_like(parameter) for parameter in self._parameters],
            "step": [p.new_zeros((), dtype=torch.float32) for p in self._parameters],
        }


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """The gradient of a parameter that must have one."""
    assert parameter.grad is not None, f"a parameter of shape {tuple(parameter.shape)} has no grad"
    return parameter.grad
