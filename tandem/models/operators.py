# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer that are not matrix products, as one replaceable set.

Trainer and rollout call the same set. ``TORCH`` runs on every device and defines the results; an
accelerator brings fused kernels with the same signatures, forward and backward. Matrix products
are not here: the vendors' libraries are the fastest there are.

Shapes: T tokens, D hidden, M heads, E head dimension, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Angles = tuple[Tensor, Tensor]
"""Cosines and signed sines (T, 1, E) of ``rotary.Rotary.angles``."""


class AddNorm(Protocol):
    """See ``Operators.add_norm``."""

    def __call__(
        self, x_TD: Tensor, delta_TD: Tensor | None, *, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Operators:
    """Differentiable functions of tensors.

    Attributes:
        add_norm: ``(x_TD, delta_TD or None, weight_D=, eps=) -> (h_TD, sum_TD)``: the residual sum
            x + delta and its root mean square norm times the weight.
        rotate: ``(x_TME, angles) -> y_TME``: the rotary embedding of M heads at once; the sines
            carry the sign of their first half. ``x_TME`` may be a slice of a larger tensor.
        gate: ``gate_up_T2F -> y_TF``: silu of the first half times the second.
    """

    add_norm: AddNorm
    rotate: Callable[[Tensor, Angles], Tensor]
    gate: Callable[[Tensor], Tensor]


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, *, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``Operators.add_norm``."""
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    return F.rms_norm(sum_TD, weight_D.shape, weight_D, eps), sum_TD


def rotate(x_TME: Tensor, angles: Angles) -> Tensor:
    """See ``Operators.rotate``."""
    cos_T1E, sin_T1E = angles
    rolled_TME = x_TME.roll(x_TME.shape[-1] // 2, -1)
    return torch.addcmul(x_TME * cos_T1E, rolled_TME, sin_T1E)


def gate(gate_up_T2F: Tensor) -> Tensor:
    """See ``Operators.gate``."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return F.silu(gate_TF) * up_TF


TORCH = Operators(add_norm, rotate, gate)
