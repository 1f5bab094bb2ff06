# SPDX-License-Identifier: Apache-2.0
"""Generation by the native engine on one accelerator: prefill, admission, decode, ends.

    python benchmarks/decode.py [--model qwen2.5-0.5b ...] [--workload S T] [--repeats 5]
    [--warmup 2] [--rows 256 512] [--quantization fp8] [--lora-rank 32] [--output FILE]

Prints one JSON object and a table. A repeat generates the whole workload; the first ones are
warm-up (compilation, graph capture) and not counted. With ``--rows``, sequences of the workload
follow each other in so many rows instead, as in asynchronous runs: the rate once they are of all
ages. The floor adds up, position by position, the larger of matrix products at the measured rate
and bytes (weights, cached keys and values) at the measured copy rate; where lengths are drawn, for
the rows that are expected to be left. It counts the keys and values of a prompt for each of its
samples. It is that of bf16, also with ``--quantization``, and does not count adapters. Routers of
experts are balanced (``shapes.plant_balance``).
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import copy_rate, describe, matmul_rate, peak_gib, synchronize, tell, write
from processes import children_end
from shapes import (
    EOS_ID,
    PEAK_FLOPS,
    SHAPES,
    WORKLOADS,
    Shape,
    Workload,
    decode_steps,
    generation_floor_s,
    plant_balance,
    plant_end,
    random_decoder,
)

from tandem.models.operators import operators_for
from tandem.models.quantized import QuantizedDecoder
from tandem.platforms.select import select_platform
from tandem.rollout.paged.engine import WINDOW_TOKENS, PagedRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams

CACHE_BYTES = 64 << 30
CONTINUOUS_WARMUP_S = 12.0
"""With three milliseconds a step as long as a response of 4096 tokens."""
CONTINUOUS_S = 5.0


def requests_of(workload: Workload, *, seed: int, vocabulary: int) -> list[GenerationRequest]:
    """Random prompts; every sample has an id of its own, so that repeats differ."""
    rng = random.Random(seed)
    sampling = SamplingParams(1.0, 1.0, -1, workload.response, workload.mean_response is None)
    first = seed * workload.prompts * workload.samples
    return [
        GenerationRequest(
            tuple(range(first + i * workload.samples, first + (i + 1) * workload.samples)),
            tuple(rng.randrange(1000, min(100_000, vocabulary)) for _ in range(workload.prompt)),
            sampling,
        )
        for i in range(workload.prompts)
    ]


def generate(engine: PagedRolloutEngine, requests: list[GenerationRequest]) -> list[Completion]:
    """All completions."""
    engine.add(requests)
    completions: list[Completion] = []
    while finished := engine.advance():
        completions += finished
    return completions


@dataclass(frozen=True)
class How:
    """The precision of the weights, and the rank of adapters; None and 0 for plain bf16."""

    quantization: str | None
    lora_rank: int


def make_engine(shape: Shape, workload: Workload, *, how: How) -> PagedRolloutEngine:
    """The engine over random weights."""
    platform = select_platform("auto")
    decoder = random_decoder(
        shape,
        device=platform.device_type,
        dtype=torch.bfloat16,
        operators=operators_for(platform),
        adapter_rank=how.lora_rank,
    )
    if shape.experts:
        plant_balance(decoder)
    if workload.mean_response is not None:
        plant_end(decoder, workload.mean_response)
    config = NativeRolloutConfig(
        seed=0,
        eos_ids=(EOS_ID,),
        max_num_seqs=workload.prompts * workload.samples,
        max_num_batched_tokens=8192,
        max_cache_bytes=CACHE_BYTES,
    )
    return PagedRolloutEngine(
        decoder,
        config,
        make_capturer=platform.make_capturer,
        num_multiprocessors=platform.num_multiprocessors(),
        quantized=None if how.quantization is None else QuantizedDecoder(decoder),
    )


def run(name: str, workload_name: str, *, warmup: int, repeats: int, how: How) -> dict[str, Any]:
    """Measure one row of the table."""
    shape, workload = SHAPES[name], WORKLOADS[workload_name]
    torch.accelerator.reset_peak_memory_stats()
    engine = make_engine(shape, workload, how=how)
    rates, seconds, counts = [], [], []
    for repeat in range(warmup + repeats):
        requests = requests_of(workload, seed=repeat, vocabulary=shape.vocabulary)
        synchronize()
        start = time.perf_counter()
        completions = generate(engine, requests)
        synchronize()
        elapsed = time.perf_counter() - start
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        if repeat >= warmup:
            rates.append(num_tokens / elapsed)
            seconds.append(elapsed)
            counts.append(num_tokens)
        else:
            print(f"warm-up {repeat}: {elapsed:.2f} s", flush=True)
    median_s = statistics.median(seconds)
    flops, bandwidth = matmul_rate(), copy_rate()
    floor_s = generation_floor_s(shape, workload, flops=flops, bandwidth=bandwidth)
    steps = decode_steps(shape, workload)
    operations, moved = (sum(numbers) for numbers in zip(*steps, strict=True))
    return {
        "model": name,
        "workload": workload_name,
        **asdict(how),
        "settings": asdict(workload),
        "tokens_per_s": statistics.median(rates),
        "all_tokens_per_s": rates,
        "seconds": median_s,
        "tokens": statistics.median(counts),
        "floor_s": floor_s,
        "ratio_to_floor": median_s / floor_s,
        "bandwidth_share": moved / median_s / bandwidth,
        "mfu_989": operations / median_s / PEAK_FLOPS,
        "mfu_matmul": operations / median_s / flops,
        "matmul_tflops": flops / 1e12,
        "copy_tb_per_s": bandwidth / 1e12,
        "peak_gib": peak_gib(),
    }


def run_continuously(name: str, workload_name: str, *, num_rows: int, how: How) -> dict[str, Any]:
    """Measure one row: sequences follow each other, and an eighth more of them wait.

    ``num_rows`` is a multiple of the workload's samples.
    """
    workload = WORKLOADS[workload_name]
    batch = replace(workload, prompts=num_rows // workload.samples)
    torch.accelerator.reset_peak_memory_stats()
    engine = make_engine(SHAPES[name], batch, how=how)
    queue = itertools.chain.from_iterable(
        requests_of(batch, seed=seed, vocabulary=SHAPES[name].vocabulary)
        for seed in itertools.count()
    )
    num_sent = num_ended = 0

    def window() -> None:
        nonlocal num_sent, num_ended
        while num_sent - num_ended < num_rows + num_rows // 8:
            request = next(queue)
            engine.add([request])
            num_sent += len(request.sample_ids)
        num_ended += len(engine.advance(WINDOW_TOKENS))

    def seconds_of(at_least_s: float) -> float:
        start = time.perf_counter()
        while time.perf_counter() - start < at_least_s:
            window()
        synchronize()
        return time.perf_counter() - start

    seconds_of(CONTINUOUS_WARMUP_S)
    before = engine.num_decoded_tokens
    elapsed = seconds_of(CONTINUOUS_S)
    num_tokens = engine.num_decoded_tokens - before
    return {
        "model": name,
        "workload": workload_name,
        **asdict(how),
        "settings": asdict(workload),
        "rows": num_rows,
        "tokens_per_s": num_tokens / elapsed,
        "ms_per_token_of_a_row": 1e3 * elapsed * num_rows / num_tokens,
        "matmul_tflops": matmul_rate() / 1e12,
        "copy_tb_per_s": copy_rate() / 1e12,
        "peak_gib": peak_gib(),
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=["qwen2.5-0.5b"], choices=SHAPES)
    parser.add_argument("--workload", nargs="+", default=["S"], choices=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rows", nargs="+", type=int, default=[])
    parser.add_argument("--quantization", choices=["fp8"])
    parser.add_argument("--lora-rank", type=int, default=0, help="adapters of all linear maps")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    for workload, num_rows in itertools.product(arguments.workload, arguments.rows):
        if num_rows <= 0 or num_rows % WORKLOADS[workload].samples:
            parser.error(f"--rows {num_rows}: {workload} needs a multiple of its samples")
    report: dict[str, Any] = {"benchmark": "decode", **describe(), "rows": []}
    for row in measure(arguments):
        report["rows"].append(row)
        if arguments.output:  # after each row: a later one may not end in time
            write(report, arguments.output)
    tell(report, arguments.output)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table, and print each in a line."""
    how = How(arguments.quantization, arguments.lora_rank)
    for model in arguments.model:
        for workload, num_rows in itertools.product(arguments.workload, arguments.rows):
            row = run_continuously(model, workload, num_rows=num_rows, how=how)
            print(
                f"{model} {workload}, {num_rows} rows: {row['tokens_per_s']:,.0f} tokens/s, "
                f"{row['ms_per_token_of_a_row']:.2f} ms a token of a row",
                flush=True,
            )
            yield row
        for workload in [] if arguments.rows else arguments.workload:
            row = run(model, workload, warmup=arguments.warmup, repeats=arguments.repeats, how=how)
            print(
                f"{model} {workload}: {row['tokens_per_s']:,.0f} tokens/s, {row['seconds']:.2f} s, "
                f"{row['ratio_to_floor']:.2f} x floor, {row['peak_gib']:.1f} GiB",
                flush=True,
            )
            yield row


if __name__ == "__main__":
    main()
