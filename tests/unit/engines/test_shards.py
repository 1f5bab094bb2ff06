# SPDX-License-Identifier: Apache-2.0
"""The regions of all ranks together are the whole decoder, each as often as the layout says."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import chain

import pytest
import torch

from tandem.config.derived.pools import RankLayout
from tandem.engines.shards import place_of, regions_of_rank, view_of
from tandem.models.decoder import DecoderConfig, parameter_shapes
from tandem.models.experts import is_of_all_experts
from tandem.models.families import decoder_config
from tandem.types import SliceSpec
from tandem.weight_sync.plan import Layout, make_plan
from tests.unit.models.tiny_models import EXPERTS, NATIVE

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


@pytest.mark.parametrize(
    ("ranks", "tensor", "shards", "divided"),
    [(2, 1, 2, 2), (4, 1, 4, 2), (4, 2, 2, 4), (4, 2, 2, 2), (8, 2, 2, 4), (8, 1, 4, 2)],
)
def test_mo9_each_copy_of_the_ranks_holds_each_expert_once(ranks, tensor, shards, divided) -> None:
    config = decoder_config(EXPERTS["dots1"]().to_dict())
    assert config is not None
    layout = RankLayout(ranks, tensor, 1, num_shards=shards, expert_parallel=divided)
    names = [name for name in parameter_shapes(config) if is_of_all_experts(name)]
    holders = {name: torch.zeros(parameter_shapes(config)[name]) for name in names}
    for rank in range(ranks):
        found = regions_of_rank(config, layout, rank=rank, dtype=torch.float32)
        for name in names:
            for region in found[name]:
                view_of(holders[name], region).add_(1)
    assert names
    for name, count in holders.items():
        assert (count == ranks // (tensor * shards)).all(), name


TRAINERS = {
    "experts over two": RankLayout(2, 1, 1, num_shards=2, expert_parallel=2),
    "experts over four": RankLayout(4, 1, 1, num_shards=4, expert_parallel=4),
    "experts over two, sharded": RankLayout(4, 1, 1, num_shards=4, expert_parallel=2),
    "matrices over two": RankLayout(2, 2, 1, num_shards=1),
    "layers over two": RankLayout(2, 1, 1, num_shards=1, pipeline_parallel=2),
    "one": RankLayout(1, 1, 1, num_shards=1),
}
ROLLOUTS = {name: TRAINERS[name] for name in ("one", "experts over two", "matrices over two")}


def _specs(config: DecoderConfig, layout: RankLayout) -> list[tuple[SliceSpec, ...]]:
    """Return what each rank holds."""
    found = (
        regions_of_rank(config, layout, rank=rank, dtype=torch.float32)
        for rank in range(layout.num_ranks)
    )
    return [tuple(chain.from_iterable(regions.values())) for regions in found]


@pytest.mark.parametrize("rollout", ROLLOUTS)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_mo12_a_transfer_brings_each_entry_that_is_needed_once(trainer: str, rollout: str) -> None:
    """Between processes of their own, however the experts are divided on both sides."""
    config = decoder_config(EXPERTS["qwen3_moe"]().to_dict())
    assert config is not None
    sending = [Layout(held, ()) for held in _specs(config, TRAINERS[trainer])]
    needs = _specs(config, ROLLOUTS[rollout])
    plan = make_plan([*sending, *(Layout((), need) for need in needs)], message_bytes=1 << 12)
    for number, need in enumerate(needs, start=len(sending)):
        arrived = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
        for message in plan.messages:
            for segment in message.segments if number in message.route.receivers else ():
                content = segment.content
                spec = replace(need[0], offset=content.region.offset, size=content.region.size)
                view_of(arrived[content.name], spec).add_(1)
        needed = {name: torch.zeros_like(entries) for name, entries in arrived.items()}
        for spec in need:
            view_of(needed[spec.name], spec).add_(1)
        assert all(torch.equal(arrived[name], needed[name]) for name in needed)


@pytest.mark.parametrize("layout", ["experts over two", "experts over four"])
def test_mo12_experts_divided_alike_need_no_message_on_the_same_ranks(layout: str) -> None:
    """Each rank holds whole experts, and its share of the rest, on both sides."""
    config = decoder_config(EXPERTS["qwen3_moe"]().to_dict())
    assert config is not None
    held = _specs(config, TRAINERS[layout])
    assert not make_plan([Layout(own, own) for own in held], message_bytes=1 << 20).messages


def test_ranks_count_by_tensor_then_sequence_then_data() -> None:
    layout = RankLayout(8, tensor_parallel=2, sequence_parallel=2, num_shards=4)
    places = [place_of(layout, rank) for rank in range(8)]
    assert [place.tensor for place in places] == [0, 1] * 4
    assert [place.sequence for place in places] == [0, 0, 1, 1] * 2
    assert [place.data for place in places] == [0] * 4 + [1] * 4
    assert [place.shard for place in places] == [0, 0, 1, 1, 2, 2, 3, 3]
    halves = RankLayout(8, tensor_parallel=1, sequence_parallel=1, num_shards=4)
    assert astuple(place_of(halves, 6)) == (0, 2, 1, 0, 6, 0, 2, 0)
    staged = RankLayout(
        8, tensor_parallel=2, sequence_parallel=1, num_shards=2, pipeline_parallel=2
    )
    assert astuple(place_of(staged, 7)) == (1, 1, 0, 0, 1, 0, 1, 1)
    assert [staged.group_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert staged.data_parallel == 2
