# SPDX-License-Identifier: Apache-2.0
"""The differentiable collectives between the processes of a parallel layout.

All peers call them in the same order, also in the backward pass, because they compute the same
graph. Without peers they return their argument. The process groups limit the waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from tandem.models.parallel import Peers


def sum_gradients(x: Tensor, peers: Peers) -> Tensor:
    """Return ``x``, which is equal on all peers. Its gradient is the sum of their gradients."""
    return x if peers.size == 1 else _SumGradients.apply(x, peers)


def sum_values(x: Tensor, peers: Peers) -> Tensor:
    """Replace ``x`` by its sum over the peers. Each peer gets the gradient of the sum."""
    return x if peers.size == 1 else _SumValues.apply(x, peers)


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """Send ``x[i]`` to peer i, for each peer, and return the received entries by sender."""
    return x if peers.size == 1 else _Exchange.apply(x, peers)


def exchange_rows(
    x_ND: Tensor, peers: Peers, *, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send ``sent[i]`` rows to peer i, in order, and return the received rows by sender.

    The gradient takes the way back. Numbers of rows may be 0.
    """
    return _ExchangeRows.apply(x_ND, peers, list(sent), list(received))


def gather_rows(columns: Sequence[Tensor], peers: Peers) -> list[Tensor]:
    """Return the rows of all peers, by peer, of each of some tensors (T, ...), without gradient.

    All peers have the same number of rows. The tensors travel together, in one collective.
    """
    num_rows = len(columns[0])
    rows = [column.contiguous().view(num_rows, -1).view(torch.uint8) for column in columns]
    own = torch.cat(rows, 1)
    gathered = _all_to_all(own.expand(peers.size, *own.shape), peers).flatten(0, 1)
    parts = gathered.split([row.shape[1] for row in rows], 1)
    return [
        part.contiguous().view(column.dtype).view(-1, *column.shape[1:])
        for part, column in zip(parts, columns, strict=True)
    ]


def scatter_sums(y_MD: Tensor, peers: Peers) -> Tensor:
    """Return this peer's M / P rows of the sum over the peers, without gradient.

    The sum is in fp32 and in the order of the peers.
    """
    parts_PTD = _all_to_all(y_MD.unflatten(0, (peers.size, -1)), peers)
    wide = torch.promote_types(y_MD.dtype, torch.float32)
    return parts_PTD.sum(0, dtype=wide).to(y_MD.dtype)


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
    """An all-to-all, which is its own inverse and therefore its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return _all_to_all(x, peers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.peers), None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, peers: Peers, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.peers, ctx.sent, ctx.received = peers, sent, received
        return _send_rows(x_ND, peers, sent=sent, received=received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> Any:
        grad_ND = _send_rows(grad_MD, ctx.peers, sent=ctx.received, received=ctx.sent)
        return grad_ND, None, None, None


def _send_rows(x_ND: Tensor, peers: Peers, *, sent: list[int], received: list[int]) -> Tensor:
    y_MD = x_ND.new_empty(sum(received), *x_ND.shape[1:])
    distributed.all_to_all_single(y_MD, x_ND.contiguous(), received, sent, group=peers.group)
    return y_MD


def _all_to_all(x: Tensor, peers: Peers) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    distributed.all_to_all_single(received, x, group=peers.group)
    return received
