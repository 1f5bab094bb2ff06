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
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.shards import view_of
from tandem.models.experts import is_of_all_experts
from tandem.models.folder import check_folder, open_part
from tandem.models.language_model import NativeModel
from tandem.models.operators import TORCH
from tandem.models.parallel import WHOLE, ParallelLayout, Peers
from tandem.models.tensor_parallel import local_decoder
from tandem.models.weights import allocate
from tandem.types import SliceSpec
from tandem.weight_sync.handshake import LinkTensors
from tandem.weight_sync.link import open_link
from tandem.workers.shared_experts import assign, shared_experts
from tests.distributed.spawn import HOST, run_ranks
from tests.distributed.training import (
    TOTAL_STEPS,
    Case,
    assembled,
    copied_parts,
    deal,
    open_engine,
    open_sharded_model,
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
    """From the trainers of a case to so many rollouts, which hold all experts or divide them."""

    case: Case
    num_rollouts: int
    dtype: torch.dtype
    mode: dict[str, Any]
    divides_experts: bool = False


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
        *(
            _Link(Case(folders["dots1"], optim, config), 2, dtype, {}, divides_experts=True)
            for config, dtype in (
                ({"expert_model_parallel_size": 4}, torch.float32),
                ({"expert_model_parallel_size": 2}, torch.bfloat16),
                (both, torch.float32),
            )
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
    layout = WHOLE
    if link.divides_experts:
        layout = ParallelLayout(expert=Peers(rank - NUM_TRAINERS, link.num_rollouts))
    model = open_part(
        check_folder(str(link.case.folder)), layout, dtype=torch.float32, device="cpu"
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
    """Experts over two ranks, each shared by two, and over four are among them, and rollouts that
    divide them (MO12), and a correction that stays in fp32 (MO4).
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
            assert {spec.name for spec, _ in rollout[number]} == trained.keys()
            for spec, tensor in rollout[number]:
                wanted = view_of(trained[spec.name], spec)
                assert torch.equal(tensor, wanted.to(tensor.dtype)), (spec.name, link)
                dtype = torch.float32 if spec.name.endswith(".correction") else link.dtype
                assert tensor.dtype == dtype, (spec.name, link)


@dataclass(frozen=True)
class _OnOneRank:
    """A transfer within the processes of a trainer that also generate.

    Attributes:
        held, received: what a process trained, and what its rollout has.
        shares: whether the experts of both have one storage.
        sent_bytes: the size of its messages.
    """

    held: Parts
    received: Parts
    shares: bool
    sent_bytes: int


def _train_and_generate(
    rank: int, size: int, store_port: int, case: Case, dtypes: Sequence[torch.dtype]
) -> list[_OnOneRank]:
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    trained = open_sharded_model(case, rank=rank, size=size)
    engine = FsdpEngine(trained, case.optim, total_training_steps=TOTAL_STEPS)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    layout = ParallelLayout(expert=Peers(rank, size))
    found: list[_OnOneRank] = []
    for dtype in dtypes:
        shared = shared_experts(trained, layout, dtype=dtype)
        decoder = local_decoder(trained.config, layout, operators=TORCH)
        assign(decoder, shared)
        allocate(decoder, dtype=dtype, device="cpu")
        model = NativeModel(decoder, hf_config={}, source=case.folder, layout=layout)
        train_rank(engine, batches, num_rounds=num_rounds, num_steps=1)
        opened = open_link(
            store,
            place(rank, size, name=f"link {dtype}"),
            tensors=LinkTensors(sends=engine.held_slices, receives=model.held_slices),
            settings=settings(BUCKET_BYTES, BUCKET_BYTES, timeout_s=600.0),
        )
        report = opened.transfer(1)
        opened.close()
        own = {held.spec.name: held.tensor.data_ptr() for held in engine.held_slices()}
        received = [(held.spec, held.tensor.detach().clone()) for held in model.held_slices()]
        shares = [
            own[held.spec.name] == held.tensor.data_ptr()
            for held in model.held_slices()
            if is_of_all_experts(held.spec.name)
        ]
        assert len(set(shares)) == 1, "all of them or none"
        found.append(_OnOneRank(copied_parts(engine), received, shares[0], report.sent_bytes))
    return found


def test_mo12_experts_that_are_divided_alike_stay_where_they_are(tmp_path: Path) -> None:
    """They share the trainer's storage in its precision, and are copied in another one."""
    write_hf(EXPERTS["dots1"](), tmp_path)
    case = Case(tmp_path, OptimConfig(lr=1e-2), {"expert_model_parallel_size": 2})
    dtypes = (torch.float32, torch.bfloat16)
    ranks = run_ranks(_train_and_generate, 2, case, dtypes)
    for number, dtype in enumerate(dtypes):
        ends = [rank[number] for rank in ranks]
        trained = assembled(part for end in ends for part in end.held)
        others = sum(x.numel() for name, x in trained.items() if not is_of_all_experts(name))
        sent = sum(end.sent_bytes for end in ends)
        assert 0 < sent <= others * dtype.itemsize + 16 * len(trained) * len(ranks)
        for end in ends:
            assert end.shares == (dtype == torch.float32)
            assert {spec.name for spec, _ in end.received} == trained.keys()
            for spec, tensor in end.received:
                wanted = view_of(trained[spec.name], spec)
                assert torch.equal(tensor, wanted.to(tensor.dtype)), (spec.name, dtype)
