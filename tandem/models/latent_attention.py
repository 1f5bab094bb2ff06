# SPDX-License-Identifier: Apache-2.0
"""The maps of latent attention, from a layer's input to queries, keys and values of all heads.

What follows them, rotation, attention and caches, is that of ordinary attention with as many
key/value heads as heads: the rotated dimensions of a head come first, those of the keys are
repeated for every head, and values are padded with zeros to the width of the keys.

Shapes: T tokens, D hidden, H heads, E head dimension of attention, R width of the latent vector.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.latent import LatentConfig

_EPSILON = 1e-6
"""DeepSeek's code has this in the norms of latent vectors, whatever config.json says."""


class LatentProjections(nn.Module):
    """The maps of a layer.

    Attributes:
        query_latent, query_norm: the map to the vector that queries are computed from, and its
            norm; None if that is the layer's input.
        query: the queries of the heads.
        latent: the latent vector, and the part of the keys that all heads share.
        latent_norm: the norm of the latent vector.
        heads: the other part of the keys, and the values, of each head.
    """

    def __init__(
        self, config: LatentConfig, *, hidden: int, num_heads: int, has_bias: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.num_heads = num_heads
        rank = config.query_rank
        self.query_latent = None if rank is None else nn.Linear(hidden, rank, bias=has_bias)
        self.query_norm = None if rank is None else nn.RMSNorm(rank, eps=_EPSILON)
        self.query: nn.Module = nn.Linear(rank or hidden, num_heads * config.query, bias=False)
        self.latent = nn.Linear(hidden, config.key_rank + config.rotated, bias=has_bias)
        self.latent_norm = nn.RMSNorm(config.key_rank, eps=_EPSILON)
        width = num_heads * (config.plain + config.value)
        self.heads: nn.Module = nn.Linear(config.key_rank, width, bias=False)
        self._share: Callable[[Tensor], Tensor] | None = None

    def divide(
        self,
        connect: Callable[[nn.Linear], nn.Module],
        *,
        share: Callable[[Tensor], Tensor],
    ) -> None:
        """Let processes of tensor parallelism divide the heads.

        Args:
            connect: the function from a map to one whose inputs have the sum of all processes'
                gradients.
            share: the function that gives a tensor this sum.
        """
        for name in ("query", "heads"):
            self.register_module(name, connect(getattr(self, name)))
        self._share = share

    def forward(self, h_TD: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor, (T, 3 H E), before the rotation."""
        config = self.config
        source_TD = h_TD
        if self.query_latent is not None and self.query_norm is not None:
            source_TD = self.query_norm(self.query_latent(h_TD))
        q_THE = self.query(source_TD).unflatten(1, (self.num_heads, -1))
        if self._query_scale != 1.0:
            q_THE = q_THE * self._query_scale
        q_plain, q_turned = q_THE.split((config.plain, config.rotated), 2)
        latent_TR, k_turned = self.latent(h_TD).split((config.key_rank, config.rotated), 1)
        if self._share is not None:
            k_turned = self._share(k_turned)
        k_turned = self._in_halves(k_turned)[:, None].expand(-1, self.num_heads, -1)
        kv_THE = self.heads(self.latent_norm(latent_TR)).unflatten(1, (self.num_heads, -1))
        k_plain, v_THE = kv_THE.split((config.plain, config.value), 2)
        q_THE = torch.cat((self._in_halves(q_turned), q_plain), 2)
        k_THE = torch.cat((k_turned, k_plain), 2)
        return torch.cat([self._padded(x) for x in (q_THE, k_THE, v_THE)], 1).flatten(1)

    @property
    def _query_scale(self) -> float:
        """The factor of queries: attention divides scores by the root of its own dimension."""
        config = self.config
        return config.score_scale * (config.head_dim / config.query) ** 0.5

    def _in_halves(self, x: Tensor) -> Tensor:
        """Return pairs of neighbours as the first and second half, which the rotation expects."""
        if not self.config.interleaves:
            return x
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def _padded(self, x_THE: Tensor) -> Tensor:
        missing = self.config.head_dim - x_THE.shape[2]
        return F.pad(x_THE, (0, missing)) if missing else x_THE
