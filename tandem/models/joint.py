# SPDX-License-Identifier: Apache-2.0
"""A joint pass of several policies, which have one base and adapters of their own.

Each map is one product of the base's weight for all tokens, and a product of each policy's adapters
for its own. Attention is computed by each policy's own function over its own tokens, so that keys
and values are never shared. There are no gradients.

Shapes: T tokens of all policies, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.models.adapted import AdaptedLinear, add_adapters, base_weights
from tandem.models.decoder import Decoder
from tandem.models.operators import Attention

_MAPS = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The tokens of one policy in a pass.

    Attributes:
        policy: the index of the policy.
        token_ids_T, position_ids_T: its packed tokens and their positions.
        attention: the attention among them.
    """

    policy: int
    token_ids_T: Tensor
    position_ids_T: Tensor
    attention: Attention


class JointDecoder:
    """The decoders of several policies over the storage of one base. It has no weights of its own.

    The adapters may differ in rank, scale and adapted maps.
    """

    def __init__(self, decoders: Sequence[Decoder]) -> None:
        """Join decoders that share their weights, without their adapters."""
        first = decoders[0]
        with torch.device("meta"):
            self._decoder = Decoder(replace(first.config, adapters=None), first.operators)
        self._decoder.load_state_dict(base_weights(first), assign=True)
        self._decoder.requires_grad_(False)
        self._spans: list[tuple[int, slice]] = []
        for index, layer in enumerate(self._decoder.layers):
            for name in _MAPS:
                maps = [getattr(decoder.layers[index], name) for decoder in decoders]
                layer.register_module(name, _JointLinear(maps, self._spans))

    @torch.inference_mode()
    def __call__(self, parts: Sequence[PolicyTokens]) -> list[Tensor]:
        """Return the hidden states (T, D) of the tokens of each policy."""
        stops = list(accumulate(len(part.token_ids_T) for part in parts))
        spans = [
            slice(stop - len(part.token_ids_T), stop)
            for part, stop in zip(parts, stops, strict=True)
        ]
        self._spans[:] = [(part.policy, span) for part, span in zip(parts, spans, strict=True)]
        attention = _JointAttention([part.attention for part in parts], spans)
        h_TD = self._decoder(
            torch.cat([part.token_ids_T for part in parts]),
            torch.cat([part.position_ids_T for part in parts]),
            attention,
        )
        return [h_TD[span] for span in spans]


class _JointAttention:
    """The attention of several policies, each over its own tokens."""

    def __init__(self, attentions: Sequence[Attention], spans: Sequence[slice]) -> None:
        self._own = list(zip(attentions, spans, strict=True))

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Attend within each policy."""
        return torch.cat([own(layer, q_THE[x], k_TKE[x], v_TKE[x]) for own, x in self._own])


class _JointLinear(nn.Module):
    """A linear map of several policies; it has no hooks, as the decoder's own maps."""

    def __init__(self, maps: Sequence[nn.Module], spans: list[tuple[int, slice]]) -> None:
        """Join the maps of all policies. ``spans`` lists policies and their tokens in a pass."""
        super().__init__()
        self._weight = cast(Tensor, maps[0].weight)
        self._bias = cast("Tensor | None", maps[0].bias)
        # In a tuple, because a module's list of modules would be a copy that states walk through.
        self._maps = tuple(maps)
        self._spans = spans

    def __call__(self, x_TD: Tensor) -> Tensor:
        y_TN = F.linear(x_TD, self._weight, self._bias)
        for policy, span in self._spans:
            own = self._maps[policy]
            if isinstance(own, AdaptedLinear):
                add_adapters(y_TN[span], x_TD[span], own=own)
        return y_TN
