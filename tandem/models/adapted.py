# SPDX-License-Identifier: Apache-2.0
"""Linear maps with adapters (LoRA): y = W x + b, and scale B A x added to some rows of y.

Weight and bias are frozen. A fused map has an adapter for each of its adapted parts, e.g. for query
and value but not for key. All of them together are two trained tensors: ``lora_a`` stacks the
matrices A, and ``lora_b`` the matrices B. The trainer and the native engine never merge the
products into W: in bf16 an update of a thousandth of |W| would lose four fifths of itself to
rounding. Engines with weights of their own get the sums (``AdaptedLinear.sum_of``).

Shapes: T tokens, D inputs, N outputs, P adapted parts, R = P x rank, M outputs of adapted parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from tandem.models.vision import VisionTower, is_of_tower

_SUFFIXES = (".lora_a", ".lora_b")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The adapters of a decoder.

    Attributes:
        rank: the inner dimension r of each product B A.
        alpha: the numerator of the products' factor; see ``Adapters.scale``.
        has_root_scale: whether the factor is alpha / sqrt(r) (rsLoRA) instead of alpha / r.
        maps: the adapted maps by name, e.g. ``layers.0.qkv``, each with the indices of its adapted
            parts in order.
    """

    rank: int
    alpha: float
    has_root_scale: bool
    maps: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def scale(self) -> float:
        """The factor of the products B A."""
        return self.alpha / (math.sqrt(self.rank) if self.has_root_scale else self.rank)

    def parts(self, name: str) -> tuple[int, ...]:
        """Return the indices of the adapted parts of a map."""
        return dict(self.maps).get(name, ())


@dataclass(frozen=True, slots=True)
class AddedRows:
    """The place of a part: rows of the map's output, of ``lora_a`` and of ``lora_b``."""

    output: slice
    a: slice
    b: slice


@dataclass(frozen=True, slots=True)
class Addition:
    """The parts of a map that have adapters, and the factor of their products."""

    parts: tuple[AddedRows, ...]
    scale: float

    @classmethod
    def of(
        cls, widths: Sequence[int], indices: Sequence[int], *, rank: int, scale: float
    ) -> Addition:
        """Return the addition to a map whose parts have ``widths`` rows."""
        parts, b = [], 0
        for place, index in enumerate(indices):
            start, rows = sum(widths[:index]), widths[index]
            a = slice(place * rank, (place + 1) * rank)
            parts.append(AddedRows(slice(start, start + rows), a, slice(b, b + rows)))
            b += rows
        return cls(tuple(parts), scale)


class AdaptedLinear(nn.Module):
    """A linear map with frozen weights and trained adapters; it has no hooks, as ``_Linear``."""

    def __init__(
        self,
        num_inputs: int,
        widths: Sequence[int],
        *,
        bias: bool,
        config: AdapterConfig,
        name: str,
    ) -> None:
        """Create the map ``name`` with ``sum(widths)`` outputs."""
        super().__init__()
        indices = config.parts(name)
        num_added = sum(widths[index] for index in indices)
        self.weight = _frozen_parameter((sum(widths), num_inputs))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", _frozen_parameter((sum(widths),)) if bias else None)
        self.lora_a = nn.Parameter(torch.empty(len(indices) * config.rank, num_inputs))
        self.lora_b = nn.Parameter(torch.empty(num_added, config.rank))
        self.addition = Addition.of(widths, indices, rank=config.rank, scale=config.scale)

    def __call__(self, x_TD: Tensor) -> Tensor:
        own: Any = self._parameters
        return adapted_linear(
            x_TD,
            own["weight"],
            bias_N=own["bias"],
            lora_a_RD=own["lora_a"],
            lora_b_Mr=own["lora_b"],
            addition=self.addition,
        )

    @torch.no_grad()
    def sum_of(self, rows: slice) -> Tensor:
        """Return rows of the weight with the products of their adapters, (rows, D).

        The sum is computed in fp32 and rounded once to the precision of the weight.

        Args:
            rows: the rows of one part.
        """
        sum_ND = self.weight[rows].float()
        for part in self.addition.parts:
            if part.output == rows:
                product_ND = self.lora_b[part.b].float() @ self.lora_a[part.a].float()
                sum_ND = sum_ND + self.addition.scale * product_ND
        return sum_ND.to(self.weight.dtype)


def adapted_linear(
    x_TD: Tensor,
    weight_ND: Tensor,
    *,
    bias_N: Tensor | None,
    lora_a_RD: Tensor,
    lora_b_Mr: Tensor,
    addition: Addition,
) -> Tensor:
    """Return the outputs (T, N). Weight and bias get no gradient."""
    if torch.is_grad_enabled() and (lora_a_RD.requires_grad or x_TD.requires_grad):
        h_TR = _Inner.apply(x_TD, lora_a_RD, addition.scale)
        fixed = _Fixed(weight_ND, bias_N, lora_a_RD, addition)
        return _Sum.apply(x_TD, h_TR, lora_b_Mr, fixed)
    y_TN = F.linear(x_TD, weight_ND, bias_N)
    _add(
        y_TN, _inner(x_TD, lora_a_RD, scale=addition.scale), lora_b_Mr=lora_b_Mr, addition=addition
    )
    return y_TN


def add_adapters(y_TN: Tensor, x_TD: Tensor, *, own: AdaptedLinear) -> None:
    """Add the products of a map's adapters to the results of its weight, in place."""
    h_TR = _inner(x_TD, own.lora_a, scale=own.addition.scale)
    _add(y_TN, h_TR, lora_b_Mr=own.lora_b, addition=own.addition)


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a decoder belongs to an adapter."""
    return name.endswith(_SUFFIXES)


def base_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a decoder without those of its adapters, in their own storage."""
    weights = module.state_dict()
    return {name: weights[name] for name in weights if not is_adapter(name)}


def trained_names(names: Iterable[str], *, freezes_tower: bool) -> list[str]:
    """Return the names of parameters that training changes.

    They are the adapters if there are any, else all but those of a frozen tower.
    """
    every = [name for name in names if not (freezes_tower and is_of_tower(name))]
    return [name for name in every if is_adapter(name)] or every


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that training changes: see ``trained_names``."""
    towers = [part for part in module.modules() if isinstance(part, VisionTower)]
    named = dict(module.named_parameters())
    names = trained_names(named, freezes_tower=any(tower.config.is_frozen for tower in towers))
    return {name: named[name] for name in names}


def _inner(x_TD: Tensor, lora_a_RD: Tensor, *, scale: float) -> Tensor:
    """Return scale A x of all parts, (T, R)."""
    return F.linear(x_TD, lora_a_RD).mul_(scale)


def _add(y_TN: Tensor, h_TR: Tensor, *, lora_b_Mr: Tensor, addition: Addition) -> None:
    # Into the result of the base with one rounding, in trainer and rollout alike.
    for part in addition.parts:
        y_TN[:, part.output].addmm_(h_TR[:, part.a], lora_b_Mr[part.b].T)


@dataclass(frozen=True, slots=True)
class _Fixed:
    """The arguments of ``_Sum`` that get no gradient from it. Autograd need not know them."""

    weight_ND: Tensor
    bias_N: Tensor | None
    lora_a_RD: Tensor
    addition: Addition


class _Inner(torch.autograd.Function):
    """The inner products h = scale A x. Of an adapted map, a recomputation repeats only these.

    ``torch.utils.checkpoint`` stops a recomputation at the last tensor that any function saves. A
    function saves its tensors after its forward pass. ``_Sum`` saves none, and therefore its
    product with W is not repeated. dA = scale dh^T x; ``_Sum`` returns the whole gradient of x.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, lora_a_RD: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x_TD)
        ctx.scale = scale
        return _inner(x_TD, lora_a_RD, scale=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h_TR: Tensor) -> Any:
        (x_TD,) = ctx.saved_tensors
        return None, (ctx.scale * grad_h_TR).T @ x_TD, None


class _Sum(torch.autograd.Function):
    """The outputs y = W x + b + B h with h = scale A x, and the gradients of x, h and B.

    dh = B^T dy, dB = dy h^T, dx = W^T dy + scale A^T dh.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, h_TR: Tensor, lora_b_Mr: Tensor, fixed: _Fixed) -> Tensor:
        y_TN = F.linear(x_TD, fixed.weight_ND, fixed.bias_N)
        _add(y_TN, h_TR, lora_b_Mr=lora_b_Mr, addition=fixed.addition)
        # Not by save_for_backward: see _Inner. h is small, and the others are parameters.
        ctx.kept = h_TR, lora_b_Mr, fixed
        ctx.versions = _versions(h_TR, lora_b_Mr, fixed=fixed)
        return y_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> Any:
        h_TR, lora_b_Mr, fixed = ctx.kept
        unchanged = ctx.versions == _versions(h_TR, lora_b_Mr, fixed=fixed)
        assert unchanged, "a weight was changed between forward and backward pass"
        grad_h_TR, grad_b_Mr = torch.empty_like(h_TR), torch.empty_like(lora_b_Mr)
        for part in fixed.addition.parts:
            own_TN = grad_TN[:, part.output]
            torch.mm(own_TN, lora_b_Mr[part.b], out=grad_h_TR[:, part.a])
            torch.mm(own_TN.T, h_TR[:, part.a], out=grad_b_Mr[part.b])
        grad_x_TD = None
        if ctx.needs_input_grad[0]:
            grad_x_TD = (grad_TN @ fixed.weight_ND).addmm_(
                grad_h_TR, fixed.lora_a_RD, alpha=fixed.addition.scale
            )
        return grad_x_TD, grad_h_TR, grad_b_Mr, None


def _versions(h_TR: Tensor, lora_b_Mr: Tensor, *, fixed: _Fixed) -> list[int]:
    read = (h_TR, lora_b_Mr, fixed.weight_ND, fixed.lora_a_RD)
    return [tensor._version for tensor in read]


def _frozen_parameter(shape: tuple[int, ...]) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
