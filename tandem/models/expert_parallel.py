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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, distributed
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig
from tandem.models.collectives import (
    exchange_rows,
    gather_rows,
    scatter_sums,
    sum_gradients,
    sum_values,
)
from tandem.models.decoder import Decoder, DecoderLayer
from tandem.models.expert_products import (
    ExpertOrder,
    Matrices,
    combine_rows,
    gather_weights,
    order_by_expert,
    spread,
    train_part,
)
from tandem.models.experts import Experts, RoutedExperts
from tandem.models.operators import Operators
from tandem.models.parallel import ParallelLayout, Peers


def divide_experts(experts: Experts, layout: ParallelLayout) -> None:
    """Replace the experts of a layer by those of one process, without values."""
    config, hidden = experts.config, experts.router.shape[1]
    assert config.num_experts % layout.expert.size == 0, "experts that do not divide are refused"
    experts.routed = _DividedExperts(config, hidden=hidden, layout=layout)


def compute_for_peers(decoder: Decoder, *, num_rows: int = 0) -> None:
    """Take part in a pass of the peers without a token: compute what their tokens need here.

    Args:
        num_rows: the number of rows that do not count, in a pass with ``equal_rows``.
    """
    weight = decoder.lm_head_weight
    h_TD = weight.new_zeros(num_rows, weight.shape[1])
    wide = torch.promote_types(weight.dtype, torch.float32)
    for experts in _divided(decoder):
        size = (num_rows, experts.num_chosen)
        experts(
            h_TD,
            decoder.operators,
            expert_TK=torch.zeros(size, dtype=torch.int64, device=weight.device),
            weight_TK=torch.zeros(size, dtype=wide, device=weight.device),
        )


@contextmanager
def equal_rows(decoder: Decoder) -> Iterator[None]:
    """Exchange rows by collectives whose sizes depend on the number of rows only.

    All processes then have the same number of rows, some of which may not count, and the host does
    not wait for the device, so that a pass can be captured. Each process computes its experts for
    the rows of all, and the partial sums are added. Without experts that are divided, nothing
    changes. Gradients do not take this way.
    """
    divided = list(_divided(decoder))
    for experts in divided:
        experts.has_equal_rows = True
    yield
    for experts in divided:  # not after an error, which ends the run
        experts.has_equal_rows = False


def _divided(decoder: Decoder) -> Iterator[_DividedExperts]:
    for layer in cast(Iterable[DecoderLayer], decoder.layers):
        if layer.experts is not None and isinstance(layer.experts.routed, _DividedExperts):
            yield layer.experts.routed


class _DividedExperts(RoutedExperts):
    """The experts of one process, for the tokens of all processes.

    Tensor-parallel processes hold the same tokens: each of them sends its share.

    Attributes:
        num_chosen: the number of experts of a token.
        has_equal_rows: see ``equal_rows``.
    """

    def __init__(self, config: ExpertConfig, *, hidden: int, layout: ParallelLayout) -> None:
        num_experts = config.num_experts // layout.expert.size
        super().__init__(num_experts, config.inner, hidden=hidden)
        self.num_chosen = config.num_chosen
        self.has_equal_rows = False
        self._peers, self._tensor = layout.expert, layout.tensor

    def forward(
        self,
        h_TD: Tensor,
        operators: Operators,
        *,
        expert_TK: Tensor,
        weight_TK: Tensor,
    ) -> Tensor:
        if self.has_equal_rows:
            return self._gather_and_sum(h_TD, operators, expert_TK=expert_TK, weight_TK=weight_TK)
        first, last = _share(len(h_TD), self._tensor)
        own_TD = sum_gradients(h_TD, self._tensor)[first:last]
        weight_TK = sum_gradients(weight_TK, self._tensor)[first:last]
        y_TD = self._send_and_combine(
            own_TD, operators, expert_TK=expert_TK[first:last], weight_TK=weight_TK
        )
        if self._tensor.size == 1:
            return y_TD
        return sum_values(F.pad(y_TD, (0, 0, first, len(h_TD) - last)), self._tensor)

    def _gather_and_sum(
        self,
        h_TD: Tensor,
        operators: Operators,
        *,
        expert_TK: Tensor,
        weight_TK: Tensor,
    ) -> Tensor:
        peers, own = self._peers, len(self.gate_up)
        assert self._tensor.size == 1, "generation does not divide matrices"
        h_MD, expert_MK, weight_MK = gather_rows((h_TD, expert_TK, weight_TK), peers)
        expert_MK = expert_MK - peers.rank * own
        is_foreign_MK = (expert_MK < 0) | (expert_MK >= own)
        y_MD = operators.experts(
            h_MD,
            expert_MK.masked_fill(is_foreign_MK, own),
            weight_TK=weight_MK,
            gate_up_E2FD=self.gate_up,
            down_EDF=self.down,
            is_part=True,
        )
        return scatter_sums(y_MD, peers)

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
        parts = operators.expert_parts
        x_ND = spread(h_TD, order, num_chosen=expert_TK.shape[1], parts=parts)
        x_MD = exchange_rows(x_ND, peers, sent=sent, received=received)
        weight_N1 = gather_weights(weight_TK, order)
        weight_M1 = exchange_rows(weight_N1, peers, sent=sent, received=received)
        ids_G = torch.arange(own, device=x_MD.device)
        expert_M = ids_G.repeat(peers.size).repeat_interleave(
            from_PG.flatten(), output_size=sum(received)
        )
        z_MD = train_part(
            x_MD,
            order_by_expert(expert_M, own),
            weight_M1=weight_M1,
            matrices=Matrices(self.gate_up, self.down),
            parts=parts,
        )
        z_ND = exchange_rows(z_MD, peers, sent=received, received=sent)
        return combine_rows(z_ND, order, weight_TK=weight_TK, parts=parts)


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
