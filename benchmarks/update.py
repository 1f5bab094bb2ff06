# SPDX-License-Identifier: Apache-2.0
"""An optimizer step of GRPO on one accelerator: forward, backward, clipping, AdamW.

    python benchmarks/update.py [--model qwen2.5-1.5b ...] [--workload S A] [--budget 16384 ...]
    [--recompute nothing pointwise feed_forward full] [--moments auto bfloat16] [--offload-weights]
    [--layers N] [--repeats 5] [--profile FILE] [--output FILE]

Weights are fp32, and so is the optimizer unless ``--moments`` says otherwise; computation is bf16;
micro-batches are cut by ``--budget`` packed tokens. Every combination of what the options list is a
row. ``--offload-weights`` lets the fp32 weights rest in the host's memory between steps. MFU counts
the floating-point operations of the same sequences one by one, without sharing prompts and without
recomputation, against 989 TFLOP/s. Routers of experts are balanced (``shapes.plant_balance``).
``--layers`` measures the first layers of a model whose training does not fit one device.
``--profile`` writes the kernels of one further update, the longest first.
"""

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
from measure import copy_rate, describe, matmul_rate, peak_gib, synchronize, tell
from processes import children_end
from shapes import (
    PEAK_FLOPS,
    SHAPES,
    WORKLOADS,
    Shape,
    Workload,
    plant_balance,
    random_decoder,
    update_floor_s,
)
from torch.profiler import ProfilerActivity, profile

from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.schema.actor import ActorConfig
from tandem.config.schema.optim import MomentsDtype, OptimConfig
from tandem.data.packing import TrainSequence, pack_microbatches, plan_microbatches
from tandem.engines.single import SingleDeviceEngine
from tandem.models.decoder import Granularity, Recompute
from tandem.models.language_model import NativeModel
from tandem.models.operators import operators_for
from tandem.platforms.select import select_platform
from tandem.types import LossColumns, LossScale

NUM_WARMUP = 2
RECOMPUTE = ("nothing", *get_args(Granularity))


def sequences_of(workload: Workload) -> list[TrainSequence]:
    """Random tokens, every response of the full length."""
    rng = random.Random(0)
    sequences = []
    for key in range(workload.prompts):
        prompt = tuple(rng.randrange(1000, 100_000) for _ in range(workload.prompt))
        for _ in range(workload.samples):
            response = tuple(rng.randrange(1000, 100_000) for _ in range(workload.response))
            sequences.append(TrainSequence(key, prompt, response))
    return sequences


@dataclass(frozen=True)
class How:
    """To compute an update."""

    budget: int
    recompute: Recompute
    moments: MomentsDtype
    offload_weights: bool


def make_engine(shape: Shape, how: How) -> SingleDeviceEngine:
    """A trainer of random weights."""
    platform = select_platform("auto")
    decoder = random_decoder(
        shape,
        device=platform.device_type,
        dtype=torch.float32,
        operators=operators_for(platform),
    )
    if shape.experts:
        plant_balance(decoder)
    stored = NativeModel(decoder, hf_config={}, source=Path())
    model = stored.in_dtype(torch.bfloat16)
    if how.recompute != "nothing":
        model.set_gradient_checkpointing(True, how.recompute)
    return SingleDeviceEngine(
        stored,
        OptimConfig(lr=1e-6, moments_dtype=how.moments),
        total_training_steps=100,
        compute=model,
        offload_weights=how.offload_weights,
    )


def grpo_loss(workload: Workload) -> PolicyLoss:
    """The loss of GRPO without a KL term."""
    return PolicyLoss(
        loss_mode="vanilla",
        settings=ActorConfig(),
        loss_scale_factor=workload.response,
        calculate_entropy=True,
    )


def write_profile(file: Path, title: str, *, update: Callable[[], object]) -> None:
    """Append the times of an update's kernels to a file."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        update()
        synchronize()
    table = found.key_averages().table(
        sort_by="self_device_time_total", row_limit=40, max_name_column_width=100
    )
    with file.open("a", encoding="utf-8") as out:
        out.write(f"{title}\n{table}\n")


def run(
    shape: Shape, workload_name: str, *, how: How, repeats: int, profiled: Path | None
) -> dict[str, Any]:
    """Measure one row of the table."""
    workload = WORKLOADS[workload_name]
    engine, loss = make_engine(shape, how), grpo_loss(workload)
    sequences = sequences_of(workload)
    num_loss_tokens = sum(len(sequence.response_ids) for sequence in sequences)
    generator = torch.Generator().manual_seed(0)
    columns = LossColumns(torch.randn(num_loss_tokens, generator=generator))
    scale = LossScale(num_loss_tokens, len(sequences))
    torch.accelerator.reset_peak_memory_stats()
    update_s: list[float] = []
    pack_s: list[float] = []
    for repeat in range(NUM_WARMUP + repeats):
        synchronize()
        start = time.perf_counter()
        plan = plan_microbatches(sequences, max_tokens=how.budget)
        batches = pack_microbatches(sequences, plan, columns=columns)
        packed = time.perf_counter()
        engine.update(batches, loss, scale=scale, temperature=1.0)
        synchronize()
        end = time.perf_counter()
        if repeat >= NUM_WARMUP:
            update_s.append(end - packed)
            pack_s.append(packed - start)
    if profiled:
        write_profile(
            profiled,
            f"{workload_name} {how}",
            update=lambda: engine.update(batches, loss, scale=scale, temperature=1.0),
        )
    length = workload.prompt + workload.response
    pairs = len(sequences) * length**2 // 2
    num_tokens = len(sequences) * length
    num_computed = num_loss_tokens + workload.prompts * workload.prompt
    seconds = statistics.median(update_s)
    flops, computed = (
        shape.train_flops(count, num_loss_tokens, key_pairs=pairs)
        for count in (num_tokens, num_computed)
    )
    matmul, bandwidth = matmul_rate(), copy_rate()
    floor_s = update_floor_s(shape, workload, flops=matmul, bandwidth=bandwidth)
    return {
        "workload": workload_name,
        "layers": shape.layers,
        **asdict(how),
        "update_s": seconds,
        "pack_s": statistics.median(pack_s),
        "all_update_s": update_s,
        "tokens_per_s": num_tokens / seconds,
        "mfu_989": flops / seconds / PEAK_FLOPS,
        "mfu_989_computed": computed / seconds / PEAK_FLOPS,
        "mfu_matmul": flops / seconds / matmul,
        "floor_s": floor_s,
        "ratio_to_floor": seconds / floor_s,
        "peak_gib": peak_gib(),
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=["qwen2.5-0.5b"], choices=SHAPES)
    parser.add_argument("--workload", nargs="+", default=["S"], choices=WORKLOADS)
    parser.add_argument("--budget", nargs="+", type=int, default=[16384])
    parser.add_argument("--recompute", nargs="+", default=["nothing"], choices=RECOMPUTE)
    parser.add_argument("--moments", nargs="+", default=["auto"], choices=["auto", "bfloat16"])
    parser.add_argument("--offload-weights", action="store_true")
    parser.add_argument("--layers", type=int, help="so many of the first layers only")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = []
    choices = product(
        arguments.model,
        arguments.workload,
        arguments.budget,
        arguments.recompute,
        arguments.moments,
    )
    for model, workload, budget, recompute, moments in choices:
        how = How(budget, recompute, moments, arguments.offload_weights)
        shape = SHAPES[model]
        shape = replace(shape, layers=arguments.layers or shape.layers)
        repeats, profiled = arguments.repeats, arguments.profile
        measured = run(shape, workload, how=how, repeats=repeats, profiled=profiled)
        row = {"model": model, **measured}
        rows.append(row)
        print(
            f"{model} {workload} budget {budget} recompute {recompute} moments {moments}: "
            f"{row['update_s']:.3f} s, {row['tokens_per_s']:,.0f} tokens/s, MFU "
            f"{row['mfu_989']:.1%} ({row['mfu_989_computed']:.1%} computed), "
            f"{row['peak_gib']:.1f} GiB",
            flush=True,
        )
        gc.collect()  # else the next row's memory has this row's engine
        torch.accelerator.empty_cache()
    report = {"benchmark": "update", **describe(), "rows": rows}
    tell(report, arguments.output)


if __name__ == "__main__":
    main()
