# SPDX-License-Identifier: Apache-2.0
"""The choices of the routers in one pass: replaced by recorded ones, or recorded.

A choice is an argument of the forward pass. The backward pass that computes a layer again asks for
the same layer again, and gets the same answer. Rows belong to the tokens that are fed.

Shapes: T tokens, L layers with experts, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tandem.config.derived.experts import ExpertConfig

Routing = Callable[[int, Tensor], Tensor]
"""``routing(layer, own_TK) -> expert_TK``: the experts that compute, for a router's own choice."""


def route_dtype(config: ExpertConfig) -> torch.dtype:
    """Return the type of recorded experts."""
    return torch.uint8 if config.num_experts <= 256 else torch.int16


def expert_layers(config: ExpertConfig, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers with experts."""
    return tuple(index for index in range(num_layers) if index not in config.dense_layers)


def empty_routes(config: ExpertConfig, num_layers: int, *, device: torch.device) -> Tensor:
    """Return a tensor (L, K) of the type of the routes of a token, without values."""
    size = (len(expert_layers(config, num_layers)), config.num_chosen)
    return torch.empty(size, dtype=route_dtype(config), device=device)


class RecordedRoutes:
    """A ``Routing`` that keeps the routers' choices."""

    def __init__(self, config: ExpertConfig) -> None:
        self._dtype = route_dtype(config)
        self._choices: dict[int, Tensor] = {}

    def __call__(self, layer: int, own_TK: Tensor) -> Tensor:
        self._choices[layer] = own_TK.to(self._dtype)
        return own_TK

    @property
    def is_empty(self) -> bool:
        """Whether no router has chosen, as in a stage whose layers are all dense."""
        return not self._choices

    def routes(self) -> Tensor:
        """Return all choices, (T, L, K)."""
        return torch.stack([self._choices[layer] for layer in sorted(self._choices)], 1)


class ReplayedRoutes:
    """A ``Routing`` of the trainer, which measures the choices and replaces them by given ones."""

    def __init__(self, config: ExpertConfig, num_layers: int, *, routes_TLK: Tensor | None) -> None:
        """Prepare a pass. Without ``routes_TLK`` the routers choose."""
        self._num_experts = config.num_experts
        self._place = {layer: i for i, layer in enumerate(expert_layers(config, num_layers))}
        self._routes_TLK = routes_TLK
        self._overlaps: dict[int, Tensor] = {}
        self._imbalances: dict[int, Tensor] = {}

    def __call__(self, layer: int, own_TK: Tensor) -> Tensor:
        expert_TK = own_TK
        if self._routes_TLK is not None:
            expert_TK = self._routes_TLK[:, self._place[layer]].long()
            same_TKK = expert_TK[:, :, None] == own_TK[:, None, :]
            self._overlaps[layer] = same_TKK.any(2).float().mean()
        counts_E = torch.zeros(self._num_experts, device=own_TK.device)
        ones_N = torch.ones(expert_TK.numel(), device=own_TK.device)
        counts_E.scatter_add_(0, expert_TK.flatten(), ones_N)
        self._imbalances[layer] = counts_E.max() / counts_E.mean()
        return expert_TK

    def metrics(self) -> Mapping[str, Tensor]:
        """Return the metrics of the pass: means over the layers, of which a stage has its part."""
        found = {
            "actor/experts/max_over_mean": self._imbalances,
            "actor/router/replay_overlap": self._overlaps,
        }
        return {
            name: torch.stack(list(values.values())).sum() / len(self._place)
            for name, values in found.items()
            if values
        }
