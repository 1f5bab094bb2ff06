# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, 2019) through torch's fused kernel.

Not a ``torch.optim.Optimizer``: constructing one imports torch's compiler, which costs a process a
second or more before its first step, and nothing else of that class is needed here. There is one
parameter group; weights, gradients and the rate come with each step, and only moments are kept: in
the precision of the weights, or in bf16, from which every step makes fp32 ones a piece at a time
and rounds them back at random.

Shapes: N numbers of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tandem.engines.rounding import round_at_random

_EPSILON = 1e-8
PIECE_NUMBERS = 1 << 24
"""Whose moments are in fp32 at the same time: enough to fill an accelerator, 128 MiB of moments."""

Moments = dict[str, list[Tensor]]
"""Tensors by name, one a weight in the order of the weights; empty before the first step."""

Piece = tuple[Tensor, ...]
"""Runs of a weight, its gradient and its two moments, flat."""


class AdamW:
    """Decays all weights alike. Every step must be given the same weights in the same order.

    Args:
        stored: precision of the weights, their gradients and the moments.
        half_moments: the moments are bf16 instead, and rounded at random.
    """

    def __init__(
        self,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        stored: torch.dtype,
        half_moments: bool = False,
    ) -> None:
        self._betas = betas
        self._weight_decay = weight_decay
        self._half_moments = half_moments
        self._moments_dtype = torch.bfloat16 if half_moments else stored
        self.moments: Moments = {}

    def adopt(self, moments: Moments) -> None:
        """Take over moments of the same weights, whatever their precision."""
        self.moments = {
            name: parts if name == "step" else [part.to(self._moments_dtype) for part in parts]
            for name, parts in moments.items()
        }

    @torch.no_grad()
    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> None:
        """Update the weights in place."""
        self.moments = self.moments or self.zero_moments(weights)
        parts = list(weights.values())
        first, second, steps = (self.moments[x] for x in ("exp_avg", "exp_avg_sq", "step"))
        columns = (parts, [gradients[name].contiguous() for name in weights], first, second)
        if not self._half_moments:
            self._update(columns, steps, rate=rate)
            return
        # The step alone decides what is drawn: a resumed run draws the same, and so do ranks that
        # hold the same, as their parts have the same sizes in the same order.
        generator = torch.Generator(parts[0].device).manual_seed(int(steps[0]))
        for pieces in _pieces(columns, limit=PIECE_NUMBERS):
            self._update_rounded(pieces, steps[0], rate=rate, generator=generator)
        torch._foreach_add_(steps, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    def zero_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """What the first step begins with."""
        parts, dtype = weights.values(), self._moments_dtype
        return {
            "exp_avg": [torch.zeros_like(weight, dtype=dtype) for weight in parts],
            "exp_avg_sq": [torch.zeros_like(weight, dtype=dtype) for weight in parts],
            "step": [weight.new_zeros((), dtype=torch.float32) for weight in parts],
        }

    def _update_rounded(
        self, pieces: Sequence[Piece], step: Tensor, *, rate: float, generator: torch.Generator
    ) -> None:
        """Update runs of weights whose moments are in lower precision."""
        weights, gradients, *moments = (list(column) for column in zip(*pieces, strict=True))
        sizes = [len(weight) for weight in weights]
        whole = [torch.cat(moment).float() for moment in moments]
        columns = (
            [weight.float() for weight in weights],
            [gradient.float() for gradient in gradients],
            *(list(moment_N.split(sizes)) for moment_N in whole),
        )
        self._update(columns, [step.clone() for _ in sizes], rate=rate)
        for kept, moment_N in zip(moments, whole, strict=True):
            _copy(kept, round_at_random(moment_N, generator).split(sizes))
        if weights[0].dtype != torch.float32:
            _copy(weights, columns[0])

    def _update(self, columns: Sequence[list[Tensor]], steps: list[Tensor], *, rate: float) -> None:
        """One step with weights, gradients and both moments of one precision, all in place."""
        weights, gradients, first, second = columns
        adamw(
            weights,
            gradients,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
            maximize=False,
        )


def _pieces(columns: Sequence[Sequence[Tensor]], *, limit: int) -> Iterator[list[Piece]]:
    """All of the tensors, in lists of runs of ``limit`` numbers together at most."""
    pieces: list[Piece] = []
    room = limit
    for tensors in zip(*columns, strict=True):
        flat = [tensor.view(-1) for tensor in tensors]
        begin, length = 0, len(flat[0])
        while begin < length:
            end = min(begin + room, length)
            pieces.append(tuple(tensor[begin:end] for tensor in flat))
            room -= end - begin
            begin = end
            if not room:
                yield pieces
                pieces, room = [], limit
    if pieces:
        yield pieces


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
