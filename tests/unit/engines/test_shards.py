# SPDX-License-Identifier: Apache-2.0
"""The regions of all ranks together are the whole decoder, each as often as the layout says."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch

from tandem.config.derived.pools import RankLayout
from tandem.engines.shards import place_of, regions_of_rank, view_of
from tandem.models.decoder import DecoderConfig, parameter_shapes
from tandem.models.families import decoder_config
from tests.unit.models.tiny_models import NATIVE

CUT_BY_TENSOR_PARALLELISM = ("qkv", "o.weight", "gate_up", "down.weight")


def _config(family: str) -> DecoderConfig:
    config = decoder_config(NATIVE[family]().to_dict())
    assert config is not None
    return config


@pytest.mark.parametrize("family", ["qwen2_tied", "qwen3_biases", "llama_biases_tied"])
@pytest.mark.parametrize(
    ("ranks", "tensor", "shards"),
    [(1, 1, 1), (2, 1, 2), (3, 1, 3), (8, 1, 8), (20, 1, 20), (4, 1, 2), (4, 2, 2), (8, 2, 2)],
)
def test_every_entry_is_held_by_as_many_ranks_as_there_are_copies(
    family: str, ranks: int, tensor: int, shards: int
) -> None:
    config = _config(family)
    layout = RankLayout(ranks, tensor, sequence_parallel=1, num_shards=shards)
    copies = ranks // (tensor * shards)
    holders = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
    for rank in range(ranks):
        for name, regions in regions_of_rank(
            config, layout, rank=rank, dtype=torch.float32
        ).items():
            for region in regions:
                assert (region.name, region.shape) == (name, tuple(holders[name].shape))
                view_of(holders[name], region).add_(1)
    for name, count in holders.items():
        is_cut = any(part in name for part in CUT_BY_TENSOR_PARALLELISM)
        assert (count == copies * (1 if is_cut else tensor)).all(), name


def test_ranks_count_by_tensor_then_sequence_then_data() -> None:
    layout = RankLayout(8, tensor_parallel=2, sequence_parallel=2, num_shards=4)
    places = [place_of(layout, rank) for rank in range(8)]
    assert [place.tensor for place in places] == [0, 1] * 4
    assert [place.sequence for place in places] == [0, 0, 1, 1] * 2
    assert [place.data for place in places] == [0] * 4 + [1] * 4
    assert [place.shard for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    halves = RankLayout(8, tensor_parallel=1, sequence_parallel=1, num_shards=4)
    assert astuple(place_of(halves, 6)) == (0, 2, 1, 0, 6)
