# SPDX-License-Identifier: Apache-2.0
"""Weights of the real engines: from trainers under FSDP2, with tensor parallelism too, after a
step, to rollouts' models in another precision, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store

from tandem.comm.store import connect_store
from tandem.comm.world import WorldPlace, join_world
from tandem.config.schema.optim import OptimConfig
from tandem.models.folder import check_folder, open_part
from tandem.models.language_model import NativeModel
from tandem.models.parallel import WHOLE
from tandem.types import SliceSpec
from tandem.weight_sync.handshake import LinkTensors
from tandem.weight_sync.link import open_link
from tests.distributed.spawn import HOST, run_ranks
from tests.distributed.training import (
    Case,
    assembled,
    copied_parts,
    deal,
    open_engine,
    train_rank,
)
from tests.fakes.patience import LIMIT_S
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf
from tests.unit.weight_sync.layouts import CPU, place, settings

NUM_TRAINERS = 4
BUCKET_BYTES = 4096
"""Smaller than the largest tensors."""

Parts = list[tuple[SliceSpec, Tensor]]


@dataclass(frozen=True)
class _Link:
    """From the trainers of a case to so many rollouts."""

    case: Case
    num_rollouts: int
    dtype: torch.dtype
    mode: dict[str, Any]


def _links(folders: dict[str, Path]) -> list[_Link]:
    optim = OptimConfig(lr=1e-2)
    both = {"tensor_model_parallel_size": 2}
    tied, untied, biases = (
        Case(folders[family], optim, config)
        for family, config in [("qwen2_tied", both), ("qwen2_untied", both), ("qwen3_biases", {})]
    )
    in_copies = {"staged": True, "double_buffered": True}
    return [
        _Link(tied, 2, torch.bfloat16, {}),
        _Link(tied, 1, torch.float32, in_copies),
        _Link(untied, 2, torch.float32, {}),
        _Link(untied, 2, torch.bfloat16, in_copies),
        _Link(biases, 1, torch.bfloat16, {}),
        _Link(
            Case(folders["dots1"], optim, {"expert_model_parallel_size": 2}), 1, torch.bfloat16, {}
        ),
    ]


def _train_and_send(
    rank: int, size: int, store_port: int, links: Sequence[_Link]
) -> dict[int, Parts]:
    """What this rank held when it sent, or what it has received, by the number of the link."""
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    trains = rank < NUM_TRAINERS
    if trains:
        join_world(
            store, WorldPlace("trainers", rank, NUM_TRAINERS, CPU, "gloo", timeout_s=LIMIT_S)
        )
    take_part = _send if trains else _receive
    parts = {
        number: take_part(rank, store, link=link, name=f"link {number}")
        for number, link in enumerate(links)
        if rank < NUM_TRAINERS + link.num_rollouts
    }
    if trains:
        distributed.destroy_process_group()
    return parts


def _send(rank: int, store: Store, *, link: _Link, name: str) -> Parts:
    engine = open_engine(link.case, rank=rank, size=NUM_TRAINERS)
    batches, num_rounds = deal(link.case, engine, rank=rank, size=NUM_TRAINERS)
    train_rank(engine, batches, num_rounds=num_rounds, num_steps=1)
    _transfer(rank, store, link=link, tensors=LinkTensors(sends=engine.held_slices), name=name)
    return copied_parts(engine)


def _receive(rank: int, store: Store, *, link: _Link, name: str) -> Parts:
    model = open_part(
        check_folder(str(link.case.folder)), WHOLE, dtype=torch.float32, device="cpu"
    ).in_dtype(link.dtype)
    assert isinstance(model, NativeModel)
    _transfer(rank, store, link=link, tensors=LinkTensors(receives=model.held_slices), name=name)
    return [(held.spec, held.tensor.detach().clone()) for held in model.held_slices()]


def _transfer(rank: int, store: Store, *, link: _Link, tensors: LinkTensors, name: str) -> None:
    opened = open_link(
        store,
        place(rank, NUM_TRAINERS + link.num_rollouts, name=name),
        tensors=tensors,
        settings=settings(BUCKET_BYTES, BUCKET_BYTES, timeout_s=600.0, **link.mode),
    )
    opened.transfer(1)
    opened.close()


def test_16_what_a_sharded_engine_trained_arrives_bit_by_bit(tmp_path: Path) -> None:
    """Experts over two ranks, each shared by two (MO12), are among them, and a correction that
    stays in fp32 (MO4).
    """
    families = ("qwen2_tied", "qwen2_untied", "qwen3_biases", "dots1")
    for family in families:
        write_hf((NATIVE | EXPERTS)[family](), tmp_path / family)
    links = _links({family: tmp_path / family for family in families})
    ranks = run_ranks(_train_and_send, NUM_TRAINERS + 2, links, joined=False)
    for number, link in enumerate(links):
        trained = assembled(part for rank in ranks[:NUM_TRAINERS] for part in rank[number])
        model = open_part(
            check_folder(str(link.case.folder)), WHOLE, dtype=torch.float32, device="cpu"
        )
        before = dict(model.module.named_parameters())
        assert not all(torch.equal(trained[name], before[name]) for name in trained)
        for rollout in ranks[NUM_TRAINERS : NUM_TRAINERS + link.num_rollouts]:
            arrived = {spec.name: tensor for spec, tensor in rollout[number]}
            assert arrived.keys() == trained.keys()
            for name, tensor in arrived.items():
                assert torch.equal(tensor, trained[name].to(tensor.dtype)), (name, link)
                dtype = torch.float32 if name.endswith(".correction") else link.dtype
                assert tensor.dtype == dtype, (name, link)
