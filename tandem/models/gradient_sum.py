# SPDX-License-Identifier: Apache-2.0
"""The sum of a weight's gradients over micro-batches, in a precision of its own.

A linear map adds its product to the sum of its weight directly, where there is one. With Triton's
operators on a device, the gradient then never exists in the precision of the passes, and is not
rounded to it. Other gradients are added when the backward pass has computed them.

Shapes: T tokens, I inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

_ATTRIBUTE = "tandem_gradient_sum"


class AddProduct(Protocol):
    """The type of ``Operators.add_product``."""

    def __call__(self, total_NI: Tensor, y_TN: Tensor, *, x_TI: Tensor) -> object: ...


class GradientSum:
    """The sum of the gradients of a weight, which keeps no gradient itself.

    It does not refer to the weight, which refers to it.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        dtype: torch.dtype,
        *,
        add_into: Callable[[Tensor, Tensor], object],
        add_product: AddProduct,
    ) -> None:
        """Add up the gradients of every backward pass from now on.

        Args:
            dtype: the precision of the sum.
            add_into, add_product: see ``operators.Operators``.
        """
        self._like = torch.empty_like(weight, dtype=dtype, device="meta")
        self._device = weight.device
        self._add_into = add_into
        self._add_product = add_product
        self._total: Tensor | None = None
        setattr(weight, _ATTRIBUTE, self)
        weight.register_post_accumulate_grad_hook(self._add)

    @property
    def total(self) -> Tensor:
        """The sum since ``begin``."""
        assert self._total is not None, "no sum has begun"
        return self._total

    def begin(self) -> None:
        """Allocate a sum of zeros."""
        self._total = torch.zeros_like(self._like, device=self._device)

    def drop(self) -> None:
        """Free the sum."""
        self._total = None

    @torch.no_grad()
    def add_product(self, y_TN: Tensor, x_TI: Tensor) -> None:
        """Add y^T x, a part of the gradient of a weight (N, I)."""
        self._add_product(self.total, y_TN, x_TI=x_TI)

    @torch.no_grad()
    def _add(self, weight: Tensor) -> None:
        if weight.grad is not None:  # it is None if all of it came as products
            self._add_into(self.total, weight.grad)
            weight.grad = None


def sum_of(weight: Tensor) -> GradientSum | None:
    """Return the sum of the gradients of ``weight``, if it has one."""
    return getattr(weight, _ATTRIBUTE, None)


def linear(x_TI: Tensor, weight_NI: Tensor, *, bias_N: Tensor | None) -> Tensor:
    """Return ``F.linear(x_TI, weight_NI, bias_N)``, (T, N)."""
    gradients = sum_of(weight_NI) if torch.is_grad_enabled() else None
    if gradients is None or not (x_TI.requires_grad or weight_NI.requires_grad):
        return F.linear(x_TI, weight_NI, bias_N)
    kept_TI = _Inputs.apply(x_TI, weight_NI)
    return _Product.apply(kept_TI, bias_N, (weight_NI, gradients, kept_TI.grad_fn))


class _Inputs(torch.autograd.Function):
    """The inputs of a product, which it saves before the product is computed.

    ``torch.utils.checkpoint`` stops a recomputation at the last tensor that any function saves. A
    function saves its tensors after its forward pass. ``_Product`` saves none, so that a product at
    the end is not repeated.
    """

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_NI: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_TI, weight_NI)
        return x_TI.view_as(x_TI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x_TI: Tensor | None) -> Any:
        return grad_x_TI, None


class _Product(torch.autograd.Function):
    """The product of inputs that ``_Inputs`` has saved, with their weight, in its node."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, bias_N: Tensor | None, way: tuple[Tensor, GradientSum, Any]
    ) -> Tensor:
        weight_NI, ctx.gradients, ctx.inputs = way
        ctx.set_materialize_grads(False)
        return F.linear(x_TI, weight_NI, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor | None) -> Any:
        if grad_TN is None:
            return None, None, None
        x_TI, weight_NI = ctx.inputs.saved_tensors
        needs_x, needs_weight = ctx.inputs.needs_input_grad
        grad_x_TI = grad_TN @ weight_NI if needs_x else None
        if needs_weight:
            ctx.gradients.add_product(grad_TN, x_TI)
        grad_bias_N = grad_TN.sum(0) if ctx.needs_input_grad[1] else None
        return grad_x_TI, grad_bias_N, None
