# SPDX-License-Identifier: Apache-2.0
"""AdamW (Loshchilov and Hutter, 2019) and Adam (Kingma and Ba, 2015) through torch's fused kernel.

It is not a ``torch.optim.Optimizer``, because constructing one imports torch's compiler, which
takes 1.5 s. Weights, gradients and the learning rate are arguments of each step; only the moments
are state. They have the precision of the weights, or are bf16: each step then converts them to fp32
one chunk at a time and rounds them back stochastically.

Shapes: N elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam

_EPSILON = 1e-8
CHUNK_NUMBERS = 1 << 24
"""The number of elements whose moments are in fp32 at the same time (128 MiB)."""
_DROPPED_BITS = 16
"""The bits of the mantissa of fp32 that bf16 lacks."""
_INDEX_BITS = 12
"""The bits of a seed that number the weights. Numbers of larger models reach into the step's."""

Moments = dict[str, list[Tensor]]
"""The moments by name, one tensor per weight, in order; empty before the first step."""

Run = tuple[Tensor, ...]
"""Consecutive elements of a weight, its gradient and its two moments, flat."""


class AdamW:
    """An optimizer with decay of all weights, which are the same in every step.

    Args:
        is_coupled: whether decay is added to the gradient, as in Adam, and so passes through the
            moments. Otherwise it is decoupled: weights shrink by the rate times the decay.
        stored: the precision of weights, gradients and moments.
        half_moments: whether the moments are bf16, rounded stochastically.
    """

    def __init__(
        self,
        *,
        betas: tuple[float, float],
        weight_decay: float,
        stored: torch.dtype,
        half_moments: bool = False,
        is_coupled: bool = False,
    ) -> None:
        self._is_coupled = is_coupled
        self._betas = betas
        self._weight_decay = weight_decay
        self._half_moments = half_moments
        self._moments_dtype = torch.bfloat16 if half_moments else stored
        self.moments: Moments = {}
        self.new_moments: Callable[[Mapping[str, Tensor]], Moments] = self.zero_moments
        """Creates the moments before the first step; replaced if they rest elsewhere."""

    def adopt(self, moments: Moments) -> None:
        """Restore moments of the same weights, in any precision."""
        self.moments = {
            name: parts if name == "step" else [part.to(self._moments_dtype) for part in parts]
            for name, parts in moments.items()
        }

    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> None:
        """Update the weights in place."""
        self.moments = self.moments or self.new_moments(weights)
        self.step_with(self.moments, weights, gradients=gradients, rate=rate)

    @torch.no_grad()
    def step_with(
        self,
        moments: Moments,
        weights: Mapping[str, Tensor],
        *,
        gradients: Mapping[str, Tensor],
        rate: float,
        first_index: int = 0,
    ) -> None:
        """Update weights and their ``moments`` in place.

        Args:
            weights: some of all weights, in order.
            first_index: the number of weights before them.
        """
        parts = list(weights.values())
        first, second, steps = (moments[x] for x in ("exp_avg", "exp_avg_sq", "step"))
        columns = (parts, [gradients[name].contiguous() for name in weights], first, second)
        if not self._half_moments:
            self._update(columns, steps, rate=rate)
            return
        # The step and the weight seed the rounding. A resumed run draws the same random numbers, as
        # do ranks with the same part of a weight, whatever they hold of others. On a CPU, torch
        # reads the low 32 bits of a seed only.
        seed = (int(steps[0]) << _INDEX_BITS) + first_index
        generators = [
            torch.Generator(part.device).manual_seed(seed + index)
            for index, part in enumerate(parts)
        ]
        for chunk in _chunks(columns, limit=CHUNK_NUMBERS):
            own = [generators[index] for index, _ in chunk]
            runs = [run for _, run in chunk]
            self._update_rounded(runs, steps[0], rate=rate, generators=own)
        torch._foreach_add_(steps, 1.0)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def moments_dtype(self) -> torch.dtype:
        """The precision of the moments."""
        return self._moments_dtype

    def zero_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """Return the moments before the first step."""
        parts, dtype = weights.values(), self._moments_dtype
        return {
            "exp_avg": [torch.zeros_like(weight, dtype=dtype) for weight in parts],
            "exp_avg_sq": [torch.zeros_like(weight, dtype=dtype) for weight in parts],
            "step": [weight.new_zeros((), dtype=torch.float32) for weight in parts],
        }

    def _update_rounded(
        self,
        runs: Sequence[Run],
        step: Tensor,
        *,
        rate: float,
        generators: Sequence[torch.Generator],
    ) -> None:
        """Take one step of a chunk, with the source of randomness of each run."""
        weights, gradients, *moments = (list(column) for column in zip(*runs, strict=True))
        sizes = [len(weight) for weight in weights]
        whole = [torch.cat(moment).float() for moment in moments]
        columns = (
            [weight.float() for weight in weights],
            [gradient.float() for gradient in gradients],
            *(list(moment_N.split(sizes)) for moment_N in whole),
        )
        self._update(columns, [step.clone() for _ in sizes], rate=rate)
        for kept, moment_N in zip(moments, whole, strict=True):
            parts = zip(moment_N.split(sizes), generators, strict=True)
            _copy(kept, [round_stochastically(part_N, source) for part_N, source in parts])
        if weights[0].dtype != torch.float32:
            _copy(weights, columns[0])

    def _update(self, columns: Sequence[list[Tensor]], steps: list[Tensor], *, rate: float) -> None:
        """Take one step in place; all ``columns`` have the same precision."""
        weights, gradients, first, second = columns
        adam(
            weights,
            gradients,
            first,
            second,
            max_exp_avg_sqs=[],
            state_steps=steps,
            fused=True,
            decoupled_weight_decay=not self._is_coupled,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=rate,
            weight_decay=self._weight_decay,
            eps=_EPSILON,
            maximize=False,
        )


def round_stochastically(x_N: Tensor, generator: torch.Generator) -> Tensor:
    """Round finite fp32 numbers to one of their two bf16 neighbours, without bias.

    Numbers that bf16 represents are kept. Rounding to nearest is wrong for moments: it loses every
    change below half a unit in the last place, so a moment that decays by a thousandth per step
    would never decay.

    Args:
        generator: the source of randomness, on the device of ``x_N``.
    """
    noise_N = torch.empty_like(x_N, dtype=torch.int32)
    noise_N.random_(0, 1 << _DROPPED_BITS, generator=generator)
    noise_N += x_N.view(torch.int32)  # sign and magnitude: the carry moves away from zero
    noise_N &= -1 << _DROPPED_BITS
    return noise_N.view(torch.float32).bfloat16()


def _chunks(columns: Sequence[Sequence[Tensor]], *, limit: int) -> Iterator[list[tuple[int, Run]]]:
    """Yield all tensors as lists of numbered runs with at most ``limit`` elements in total.

    The runs of a tensor do not depend on the other tensors.
    """
    chunk: list[tuple[int, Run]] = []
    room = limit
    for index, tensors in enumerate(zip(*columns, strict=True)):
        flat = [tensor.view(-1) for tensor in tensors]
        for begin in range(0, len(flat[0]), limit):
            run = tuple(tensor[begin : begin + limit] for tensor in flat)
            if len(run[0]) > room:
                yield chunk
                chunk, room = [], limit
            chunk.append((index, run))
            room -= len(run[0])
    if chunk:
        yield chunk


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))  # pyright: ignore[reportPrivateImportUsage]
