# SPDX-License-Identifier: Apache-2.0
"""How long the weights of a sharded trainer take to the rollouts.

    python benchmarks/weight_sync.py [--model qwen2.5-0.5b qwen2.5-7b] [--trainers 2]
    [--receivers 2] [--split] [--beside] [--lora-rank 32] [--output FILE]

One process a device. Each of the trainers holds the rows of every tensor that FSDP2 gives it, in
fp32; each of the receivers needs the whole model in bf16, or with ``--lora-rank`` adapters of all
linear maps alone. They share devices, or with ``--split`` have their own. Beside our transport two
baselines are timed, one tensor at a time and nothing overlapped: gather a tensor over the trainers,
then broadcast it from the first of them to those that need it (where devices are shared the
gathering alone brings it there); and NCCL's broadcast of large buffers is measured, which nothing
that sends a model once can beat.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from measure import describe
from processes import children_end
from shapes import SHAPES, adapters_of
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from tandem.comm.store import connect_store, host_store
from tandem.config.derived.pools import RankLayout
from tandem.engines.shards import regions_of_rank
from tandem.models.adapters import adapter_tensors, with_adapters
from tandem.models.decoder import DecoderConfig
from tandem.models.parallel import Regions, slices_of_rows, tensor_regions
from tandem.platforms.record import CUDA
from tandem.types import HeldSlice
from tandem.weight_sync.handshake import LinkPlace, LinkSettings, LinkTensors
from tandem.weight_sync.link import open_link

MODELS = ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]
MEBIBYTE = 1 << 20
TIMEOUT_S = 120.0
BROADCAST_BYTES = 512 * MEBIBYTE


@dataclass(frozen=True)
class Job:
    """The settings that all processes share."""

    models: list[str]
    trainers: int
    receivers: int
    split: bool
    beside: bool
    repeats: int
    send_mb: int
    receive_mb: int
    lora_rank: int
    port: int
    result: Path

    @property
    def size(self) -> int:
        """Processes."""
        return self.trainers + self.receivers if self.split else self.trainers


@dataclass(frozen=True)
class Member:
    """The tensors of a process by name, and the whole model that it receives into.

    ``num_bytes`` are those of the whole model as it is received.
    """

    model: str
    num_bytes: int
    rank: int
    device: torch.device
    shards: dict[str, Tensor]
    sends: list[HeldSlice]
    whole: dict[str, Tensor]
    receives: list[HeldSlice]


@children_end()
def main() -> None:
    """Measure, print a line a model and one JSON object."""
    options = _parser().parse_args()
    store = host_store("127.0.0.1", timeout_s=TIMEOUT_S)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job(
            options.model,
            options.trainers,
            options.trainers if options.receivers is None else options.receivers,
            options.split,
            options.split and options.beside,
            options.repeats,
            options.send_mb,
            options.receive_mb,
            options.lora_rank,
            store.place.port,
            Path(folder) / "rows.json",
        )
        spawn(_measure, (job,), nprocs=job.size)
        rows = json.loads(job.result.read_text())
    for row in rows:
        print(
            f"{row['model']}: {row['sync_ms']:.1f} ms ({row['gb_per_s']:.0f} GB/s a receiver, "
            f"{row['share_of_broadcast']:.0%} of NCCL's broadcast), one tensor at a time "
            f"{row['one_by_one_ms']:.1f} ms, first {row['first_ms']:.0f} ms, "
            f"{row['extra_mib']:.0f} MiB besides the weights"
        )
    result = {**describe(), "trainers": job.trainers, "receivers": job.receivers}
    result |= {"lora_rank": job.lora_rank}
    result |= {"placement": "split" if job.split else "colocated", "rows": rows}
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _measure(rank: int, job: Job) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_num_threads(1)  # as in Ray's workers: those of all processes share the cores
    store = connect_store("127.0.0.1", job.port, timeout_s=TIMEOUT_S)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=job.size,
        timeout=timedelta(seconds=TIMEOUT_S),
        device_id=device,
    )
    trainers = distributed.new_group(list(range(job.trainers)))
    broadcast = _broadcast_rate(device)
    rows = []
    for model in job.models:
        member = _member(model, job, rank=rank, device=device)
        row = {"model": model, "nccl_broadcast_gb_per_s": broadcast / 1e9}
        row |= _ours(member, job, store=connect_store("127.0.0.1", job.port, timeout_s=TIMEOUT_S))
        row["beside"] = [
            _beside(member, job, staged=staged, double_buffered=double)
            for staged, double in ((False, True), (True, False), (True, True))
            if job.beside
        ]
        one_by_one = _median(lambda m=member: _one_by_one(m, job, trainers=trainers), repeats=5)
        row["one_by_one_ms"] = 1e3 * one_by_one
        row["less_time_than_one_by_one"] = 1 - row["sync_ms"] / row["one_by_one_ms"]
        row["share_of_broadcast"] = row["gb_per_s"] / row["nccl_broadcast_gb_per_s"]
        rows.append(row)
        del member
        torch.cuda.empty_cache()
    if rank == job.size - 1:
        job.result.write_text(json.dumps(rows))
    distributed.barrier()
    distributed.destroy_process_group()


def _member(model: str, job: Job, *, rank: int, device: torch.device) -> Member:
    config = _config(model, job)
    shards, sends, whole, receives = {}, [], {}, []
    whole_regions = _sent(tensor_regions(config, rank=0, size=1, dtype=torch.bfloat16), config)
    if rank < job.trainers:
        layout = RankLayout(job.trainers, 1, 1, num_shards=job.trainers)
        held = regions_of_rank(config, layout, rank=rank, dtype=torch.float32)
        for name, regions in _sent(held, config).items():
            assert regions, f"{name} has fewer rows than there are trainers"
            rows = sum(region.size[0] for region in regions)
            shards[name] = torch.randn(rows, *regions[0].size[1:], device=device)
            sends += slices_of_rows(regions, shards[name])
    if not job.split or rank >= job.trainers:
        for name, regions in whole_regions.items():
            whole[name] = torch.empty(regions[0].shape, dtype=torch.bfloat16, device=device)
            receives += slices_of_rows(regions, whole[name])
    num_bytes = sum(2 * prod(regions[0].shape) for regions in whole_regions.values())
    return Member(model, num_bytes, rank, device, shards, sends, whole, receives)


def _config(model: str, job: Job) -> DecoderConfig:
    config = SHAPES[model].decoder_config()
    return with_adapters(config, adapters_of(job.lora_rank)) if job.lora_rank else config


def _sent(regions: Mapping[str, Regions], config: DecoderConfig) -> Mapping[str, Regions]:
    """Return the regions of adapters, or all if there are none."""
    names = {tensor.parameter for tensor in adapter_tensors(config)} or regions.keys()
    return {name: found for name, found in regions.items() if name in names}


def _ours(member: Member, job: Job, *, store: Any) -> dict[str, float]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    link = open_link(
        store,
        LinkPlace(
            member.model,
            member.rank,
            job.size,
            role=f"rank {member.rank}",
            device=member.device,
            platform=CUDA,
        ),
        tensors=LinkTensors(sends=lambda: member.sends, receives=lambda: member.receives),
        settings=LinkSettings(
            job.send_mb * MEBIBYTE, job.receive_mb * MEBIBYTE, timeout_s=TIMEOUT_S
        ),
    )
    first = link.transfer(0).duration_s
    seconds = [link.transfer(version).duration_s for version in range(1, job.repeats + 1)]
    extra = torch.cuda.max_memory_allocated() - before
    link.close()
    sync = statistics.median(seconds)
    received = member.num_bytes * (1 if job.split else 1 - 1 / job.trainers)
    return {
        "sync_ms": 1e3 * sync,
        "first_ms": 1e3 * first,
        "gb_per_s": received / sync / 1e9,
        "extra_mib": extra / MEBIBYTE,
    }


def _beside(
    member: Member, job: Job, *, staged: bool, double_buffered: bool
) -> dict[str, float | bool]:
    """How long a trainer and a rollout stand still if weights arrive beside those in use, and how
    long these are on their way."""
    link = open_link(
        connect_store("127.0.0.1", job.port, timeout_s=TIMEOUT_S),
        LinkPlace(
            f"{member.model} {staged} {double_buffered}",
            member.rank,
            job.size,
            role=f"rank {member.rank}",
            device=member.device,
            platform=CUDA,
        ),
        tensors=LinkTensors(sends=lambda: member.sends, receives=lambda: member.receives),
        settings=LinkSettings(
            job.send_mb * MEBIBYTE,
            job.receive_mb * MEBIBYTE,
            timeout_s=TIMEOUT_S,
            staged=staged,
            double_buffered=double_buffered,
        ),
    )
    times = []
    for version in range(job.repeats):
        distributed.barrier()
        start = time.perf_counter()
        link.begin(version)
        begun = time.perf_counter()
        link.wait()
        arrived = time.perf_counter()
        link.swap()
        times.append((begun - start, arrived - start, time.perf_counter() - arrived))
    link.close()
    pause, way, swap = (statistics.median(column) for column in zip(*times[1:], strict=True))
    own = torch.tensor([pause if member.shards else 0.0, way, swap], dtype=torch.float64)
    distributed.all_reduce(own, distributed.ReduceOp.MAX)
    trainer_ms, arrival_ms, rollout_ms = (1e3 * own).tolist()
    return {
        "staged": staged,
        "double_buffered": double_buffered,
        "trainer_ms": trainer_ms,
        "arrival_ms": arrival_ms,
        "rollout_ms": rollout_ms,
    }


def _one_by_one(member: Member, job: Job, *, trainers: Any) -> None:
    """Gather, cast, broadcast, load: a tensor after the other, each finished before the next."""
    names = member.shards or member.whole
    for name in names:
        full = None
        if member.shards:
            full = _gathered(member.shards[name], job, trainers=trainers).to(torch.bfloat16)
        if job.split:
            full = torch.empty_like(member.whole[name]) if full is None else full
            distributed.broadcast(full, 0)
        torch.cuda.synchronize()
        if member.whole:
            assert full is not None
            member.whole[name].copy_(full[: len(member.whole[name])])
            torch.cuda.synchronize()


def _gathered(shard: Tensor, job: Job, *, trainers: Any) -> Tensor:
    if job.trainers == 1:
        return shard
    full = shard.new_empty(job.trainers * len(shard), *shard.shape[1:])
    distributed.all_gather_into_tensor(full, shard, group=trainers)
    return full


def _broadcast_rate(device: torch.device) -> float:
    """Bytes a second that each receiver of a large buffer gets."""
    buffer = torch.empty(BROADCAST_BYTES, dtype=torch.uint8, device=device)
    return BROADCAST_BYTES / _median(lambda: distributed.broadcast(buffer, 0), repeats=20)


def _median(function: Callable[[], object], *, repeats: int) -> float:
    seconds = []
    for repeat in range(repeats + 2):
        torch.cuda.synchronize()
        distributed.barrier()
        start = time.perf_counter()
        function()
        torch.cuda.synchronize()
        if repeat >= 2:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time weight transport.")
    parser.add_argument("--model", nargs="+", default=MODELS, choices=SHAPES)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--receivers", type=int, help="with --split; else they are the trainers")
    parser.add_argument("--split", action="store_true", help="receivers have their own devices")
    parser.add_argument(
        "--beside", action="store_true", help="with --split: weights beside those in use, too"
    )
    parser.add_argument("--repeats", type=int, default=16)
    parser.add_argument("--send-mb", type=int, default=512)
    parser.add_argument("--receive-mb", type=int, default=128)
    parser.add_argument("--lora-rank", type=int, default=0, help="send adapters of all linear maps")
    parser.add_argument("--output", type=Path)
    return parser


if __name__ == "__main__":
    main()
