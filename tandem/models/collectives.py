# SPDX-License-Identifier: Apache-2.0
"""The three differentiable exchanges between the processes of a parallel layout.

All peers call them in the same order, backward too, which they do because they compute the same
graph. A process alone gets back what it passed. Deadlines are those of the process groups.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from tandem.models.parallel import Peers


def sum_gradients(x: Tensor, peers: Peers) -> Tensor:
    """``x`` as it is, which all peers hold alike and each uses for a part of the result; its
    gradient is the sum of theirs."""
    return x if peers.size == 1 else _SumGradients.apply(x, peers)


def sum_values(x: Tensor, peers: Peers) -> Tensor:
    """The sum of the peers' ``x``, in its place; each gets the gradient of the sum."""
    return x if peers.size == 1 else _SumValues.apply(x, peers)


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """``x[i]`` of peer j becomes the result's ``[j]`` at peer i; one entry a peer."""
    return x if peers.size == 1 else _Exchange.apply(x, peers)


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=ctx.peers.group)
        return total, None


class _SumValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.mark_dirty(x)
        distributed.all_reduce(x, group=peers.group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Exchange(torch.autograd.Function):
    """Its own inverse, and so its own derivative's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _all_to_all(x, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.peers), None


def _all_to_all(x: Tensor, peers: Peers) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=peers.group)
    return received
