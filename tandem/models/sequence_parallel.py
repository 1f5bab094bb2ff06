# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism (Jacobs et al., 2023): the tokens of a batch shared out over peers.

Each peer computes a run of L consecutive tokens, the last ones padding. For attention, tokens are
exchanged for heads and back, so that a peer attends over the whole batch with some of the heads;
key/value heads fewer than peers are repeated. A peer computes the scores of the response tokens
that follow its own tokens, and all get all of them. Summed over peers, gradients are the batch's.

Shapes: T tokens of the batch, L = ceil(T / P) tokens of a peer, P peers, R response tokens, N those
of a peer, H query heads, K key/value heads, M both kinds together at one peer, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.models.collectives import exchange, sum_values
from tandem.models.operators import Attention, upload
from tandem.models.parallel import Peers
from tandem.types import PackedBatch


class UlyssesAttention:
    """``attention(layer, q_LHE, k_LKE, v_LKE) -> o_LHE`` through an attention over T tokens."""

    def __init__(self, attention: Attention, peers: Peers, *, num_tokens: int) -> None:
        self._attention = attention
        self._peers = peers
        self._num_tokens = num_tokens

    def __call__(self, layer: int, q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor) -> Tensor:
        """Attend over the tokens of all peers with this one's share of the heads."""
        num_peers = self._peers.size
        parts = [_by_peer(x, num_peers) for x in (q_LHE, k_LKE, v_LKE)]
        x_PLME = exchange(torch.cat(parts, 2), self._peers)
        heads = [part.shape[2] for part in parts]
        q_THE, k_TKE, v_TKE = x_PLME.flatten(0, 1)[: self._num_tokens].split(heads, 1)
        o_THE = self._attention(layer, q_THE, k_TKE, v_TKE)
        padding = num_peers * len(q_LHE) - self._num_tokens
        if padding > 0:
            o_THE = F.pad(o_THE, (0, 0, 0, 0, 0, padding))
        o_PLHE = exchange(o_THE.unflatten(0, (num_peers, -1)), self._peers)
        return o_PLHE.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True, slots=True)
class OwnResponses:
    """The response tokens whose scores a peer computes, at least one.

    A peer without any computes one that counts for nothing, since kernels want rows: its place is
    behind the last.

    Attributes:
        source_N: index into the peer's own L tokens.
        target_N: token id.
        place_N: which of the R response tokens it is; None if the peer is alone and has them all.
        num_responses: R.
        peers: among whom they are shared out.
    """

    source_N: Tensor
    target_N: Tensor
    place_N: Tensor | None
    num_responses: int
    peers: Peers


def own_tokens(x_T: Tensor, peers: Peers) -> Tensor:
    """The peer's (L,) of the entries of a batch's tokens, zero where it is padding."""
    length = _own_length(len(x_T), peers)
    padded = F.pad(x_T, (0, length * peers.size - len(x_T)))
    return padded[length * peers.rank : length * (peers.rank + 1)]


def own_responses(batch: PackedBatch, peers: Peers) -> OwnResponses:
    """Those whose source token is the peer's; all of them if it is alone."""
    num_responses = len(batch.source_R)
    if peers.size == 1:
        return OwnResponses(batch.source_R, batch.target_R, None, num_responses, peers)
    length = _own_length(len(batch.token_ids_T), peers)
    place_N = (batch.source_R // length == peers.rank).nonzero()[:, 0]
    if len(place_N):
        source_N, target_N = batch.source_R[place_N] % length, batch.target_R[place_N]
    else:
        source_N = target_N = torch.zeros(1, dtype=torch.int64)
        place_N = torch.full((1,), num_responses)
    return OwnResponses(source_N, target_N, place_N, num_responses, peers)


def gather_responses(x_N: Tensor, own: OwnResponses) -> Tensor:
    """The numbers of all peers' response tokens, (R,); the gradient of each one's reaches what it
    computed."""
    if own.place_N is None:
        return x_N
    place_N = upload(own.place_N, x_N.device)
    spread = x_N.new_zeros(own.num_responses + 1).index_copy(0, place_N, x_N)
    return sum_values(spread, own.peers)[: own.num_responses]


def _own_length(num_tokens: int, peers: Peers) -> int:
    return -(-num_tokens // peers.size)


def _by_peer(x_LHE: Tensor, num_peers: int) -> Tensor:
    """(P, L, H / P, E): the heads that each peer attends with; at least one each."""
    repeats = max(1, num_peers // x_LHE.shape[1])
    if repeats > 1:
        x_LHE = x_LHE.repeat_interleave(repeats, 1)
    return x_LHE.unflatten(1, (num_peers, -1)).transpose(0, 1)
