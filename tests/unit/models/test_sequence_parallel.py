# SPDX-License-Identifier: Apache-2.0
"""Tokens and response tokens are shared out completely, each to one peer. What peers compute
together is tested with real processes in tests/distributed."""

import pytest
import torch

from tandem.models.parallel import ALONE, Peers
from tandem.models.sequence_parallel import own_responses, own_tokens
from tests.unit.models.tiny_models import pack_shared, sample_sequences


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8])
def test_tokens_are_consecutive_runs(num_tokens, size):
    x_T = torch.arange(1, num_tokens + 1)
    runs = [own_tokens(x_T, Peers(rank, size)) for rank in range(size)]
    assert {len(run) for run in runs} == {-(-num_tokens // size)}
    together = torch.cat(runs)
    assert torch.equal(together[:num_tokens], x_T)
    assert not together[num_tokens:].any()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_response_token_has_one_owner(size):
    batch = pack_shared(*sample_sequences())
    found = torch.zeros(len(batch.target_R), dtype=torch.int64)
    for rank in range(size):
        peers = Peers(rank, size)
        own = own_responses(batch, peers)
        found[own.place_N] += 1
        ids_L = own_tokens(batch.token_ids_T, peers)
        sources_R, targets_R = batch.token_ids_T[batch.source_R], batch.target_R
        assert torch.equal(ids_L[own.source_N], sources_R[own.place_N])
        assert torch.equal(own.target_N, targets_R[own.place_N])
    assert torch.equal(found, torch.ones_like(found))


def test_a_peer_without_responses_computes_one_that_has_no_place():
    batch = pack_shared([[1, 2, 3, 4, 5]], [[[6, 7, 8]]])
    own = own_responses(batch, Peers(0, 2))
    assert (own.place_N.tolist(), own.source_N.tolist()) == ([3], [0])
    assert own.num_responses == 3


def test_alone_all_are_ones_own():
    batch = pack_shared(*sample_sequences())
    own = own_responses(batch, ALONE)
    assert own.place_N is None
    assert own.source_N is batch.source_R
    assert own.target_N is batch.target_R
