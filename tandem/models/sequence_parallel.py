# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism (Jacobs et al., 2023): the tokens of a batch, divided over peers.

Each peer computes L consecutive tokens; the last peers may have padding. For attention, tokens are
exchanged for heads and back, so that a peer attends over the whole batch with some of the heads. If
there are fewer key/value heads than peers, they are repeated. A peer scores the response tokens
that its own tokens predict, and all peers receive all scores. The sum of the peers' gradients is
the gradient of the batch.

Shapes: T tokens, L = ceil(T / P) tokens of a peer, P peers, R response tokens, N of them
at a peer, H query heads, K key/value heads, M heads of both kinds at a peer, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, distributed
from torch.nn import functional as F  # noqa: N812

from tandem.models.collectives import exchange, sum_values
from tandem.models.operators import Attention, upload
from tandem.models.parallel import Peers
from tandem.types import PackedBatch


class UlyssesAttention:
    """The function ``attention(layer, q_LHE, k_LKE, v_LKE) -> o_LHE``, computed over T tokens."""

    def __init__(self, attention: Attention, peers: Peers, *, num_tokens: int) -> None:
        self._attention = attention
        self._peers = peers
        self._num_tokens = num_tokens

    def __call__(self, layer: int, q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor) -> Tensor:
        """Attend over the tokens of all peers with this peer's share of the heads."""
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
    """The response tokens whose scores a peer computes.

    Kernels need at least one row: a peer without response tokens computes a dummy at place R.

    Attributes:
        source_N: the indices into the peer's own L tokens.
        target_N: the token ids.
        place_N: the indices among the R response tokens; None if the peer has all of them.
        num_responses: R.
        peers: the peers that divide the response tokens.
    """

    source_N: Tensor
    target_N: Tensor
    place_N: Tensor | None
    num_responses: int
    peers: Peers


def own_range(num_tokens: int, peers: Peers) -> range:
    """Return the indices into T of the peer's tokens, without padding."""
    length = _own_length(num_tokens, peers)
    first = min(length * peers.rank, num_tokens)
    return range(first, min(first + length, num_tokens))


def own_tokens(x_T: Tensor, peers: Peers) -> Tensor:
    """Return the peer's part (L,) of ``x_T``, padded with zeros; further dimensions stay whole."""
    length = _own_length(len(x_T), peers)
    behind = (0, length * peers.size - len(x_T))
    padded = F.pad(x_T, (*(0, 0) * (x_T.dim() - 1), *behind))
    return padded[length * peers.rank : length * (peers.rank + 1)]


def own_responses(batch: PackedBatch, peers: Peers) -> OwnResponses:
    """Return the response tokens whose source token belongs to this peer."""
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
    """Return the scores of all peers, (R,). Gradients reach the peer that computed a score."""
    if own.place_N is None:
        return x_N
    place_N = upload(own.place_N, x_N.device)
    spread = x_N.new_zeros(own.num_responses + 1).index_copy(0, place_N, x_N)
    return sum_values(spread, own.peers)[: own.num_responses]


def gather_tokens(x_L: Tensor, peers: Peers, *, num_tokens: int) -> Tensor:
    """Return the values of all T tokens, (T,); further dimensions stay whole. No gradients."""
    if peers.size == 1:
        return x_L
    # As bytes: no library of collectives knows the int16 of routes.
    sent = x_L.contiguous().view(torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(peers.size)]
    distributed.all_gather(parts, sent, group=peers.group)
    return torch.cat(parts).view(x_L.dtype)[:num_tokens]


def _own_length(num_tokens: int, peers: Peers) -> int:
    return -(-num_tokens // peers.size)


def _by_peer(x_LHE: Tensor, num_peers: int) -> Tensor:
    """Return (P, L, H / P, E): the heads of each peer, at least one."""
    repeats = max(1, num_peers // x_LHE.shape[1])
    if repeats > 1:
        x_LHE = x_LHE.repeat_interleave(repeats, 1)
    return x_LHE.unflatten(1, (num_peers, -1)).transpose(0, 1)
