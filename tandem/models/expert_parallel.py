# SPDX-License-Identifier: Apache-2.0
"""The experts of one process of expert parallelism: tokens travel to their experts and back.

Each process holds E / P consecutive experts of every layer. It sends the rows of its tokens to the
processes of their experts, computes the rows that it receives, and sends the results back. The host
waits for the device once in a layer, to learn the numbers of rows. No token is dropped. Gradients
take the same way, so that the gradient of an expert is the sum over the tokens of all processes.

Shapes: T tokens, D hidden, E experts, P processes, G = E / P experts of a process, K chosen for a
token, N = T K assignments, M received rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, distributed
from torch.nn import functional as F  # noqa: N812

from tandem.models.collectives import exchange_rows, sum_gradients, sum_values
from tandem.models.decoder import Decoder, DecoderLayer
from tandem.models.expert_products import (
    ExpertOrder,
    collect,
    combine,
    compute,
    order_by_expert,
    spread,
)
from tandem.models.experts import Experts, RoutedExperts
from tandem.models.operators import Operators
from tandem.models.parallel import ParallelLayout, Peers


def divide_experts(experts: Experts, layout: ParallelLayout) -> None:
    """Replace the experts of a layer by those of one process, without values."""
    config, hidden = experts.config, experts.router.shape[1]
    assert config.num_experts % layout.expert.size == 0, "experts that do not divide are refused"
    experts.routed = _DividedExperts(
        config.num_experts // layout.expert.size, config.inner, hidden=hidden, layout=layout
    )


def compute_for_peers(decoder: Decoder) -> None:
    """Take part in a pass of the peers without a token: compute what their tokens need here."""
    weight = decoder.lm_head_weight
    none_TD = weight.new_empty(0, weight.shape[1])
    for layer in cast(Iterable[DecoderLayer], decoder.layers):
        if layer.experts is not None:
            num_chosen = layer.experts.config.num_chosen
            layer.experts.routed(
                none_TD,
                decoder.operators,
                expert_TK=torch.empty(0, num_chosen, dtype=torch.int64, device=weight.device),
                weight_TK=torch.empty(0, num_chosen, device=weight.device),
            )


class _DividedExperts(RoutedExperts):
    """The experts of one process, for the tokens of all processes.

    Tensor-parallel processes hold the same tokens: each of them sends its share.
    """

    def __init__(
        self, num_experts: int, inner: int, *, hidden: int, layout: ParallelLayout
    ) -> None:
        super().__init__(num_experts, inner, hidden=hidden)
        self._peers, self._tensor = layout.expert, layout.tensor

    def forward(
        self,
        h_TD: Tensor,
        operators: Operators,
        *,
        expert_TK: Tensor,
        weight_TK: Tensor,
    ) -> Tensor:
        first, last = _share(len(h_TD), self._tensor)
        own_TD = sum_gradients(h_TD, self._tensor)[first:last]
        weight_TK = sum_gradients(weight_TK, self._tensor)[first:last]
        y_TD = self._send_and_combine(
            own_TD, operators, expert_TK=expert_TK[first:last], weight_TK=weight_TK
        )
        if self._tensor.size == 1:
            return y_TD
        return sum_values(F.pad(y_TD, (0, 0, first, len(h_TD) - last)), self._tensor)

    def _send_and_combine(
        self,
        h_TD: Tensor,
        operators: Operators,
        *,
        expert_TK: Tensor,
        weight_TK: Tensor,
    ) -> Tensor:
        peers, own = self._peers, len(self.gate_up)
        order = order_by_expert(expert_TK.flatten(), peers.size * own)
        to_PG, from_PG = _exchange_counts(order, peers)
        sent, received = torch.stack((to_PG.sum(1), from_PG.sum(1))).tolist()
        x_ND = spread(h_TD, order, num_chosen=expert_TK.shape[1])
        x_MD = exchange_rows(x_ND, peers, sent=sent, received=received)
        ids_G = torch.arange(own, device=x_MD.device)
        expert_M = ids_G.repeat(peers.size).repeat_interleave(
            from_PG.flatten(), output_size=sum(received)
        )
        inner = order_by_expert(expert_M, own)
        x_MD = spread(x_MD, inner, num_chosen=1)
        z_MD = compute(
            x_MD, self.gate_up, down_EDF=self.down, stop_E=inner.stop_E, gate=operators.gate
        )
        z_ND = exchange_rows(collect(z_MD, inner), peers, sent=received, received=sent)
        return combine(z_ND, order, weight_TK=weight_TK)


def _exchange_counts(order: ExpertOrder, peers: Peers) -> tuple[Tensor, Tensor]:
    """Return the numbers of rows that go to, and come from, each process, by expert: (P, G)."""
    stop_E = order.stop_E
    counts_PG = stop_E.diff(prepend=stop_E.new_zeros(1)).view(peers.size, -1).contiguous()
    received_PG = torch.empty_like(counts_PG)
    distributed.all_to_all_single(received_PG, counts_PG, group=peers.group)
    return counts_PG, received_PG


def _share(num_tokens: int, peers: Peers) -> tuple[int, int]:
    """Return the first token of a process and the one behind its last; there may be none."""
    first, last = (num_tokens * edge // peers.size for edge in (peers.rank, peers.rank + 1))
    return first, last
