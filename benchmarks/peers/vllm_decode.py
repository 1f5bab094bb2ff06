# SPDX-License-Identifier: Apache-2.0
"""Generation by vLLM alone on the model, prompts and lengths of ``grpo_step.py``. Needs vllm, not
tandem.

    python benchmarks/grpo_step.py --model qwen2.5-0.5b --workload S --folder FOLDER --prepare
    python benchmarks/peers/vllm_decode.py --model qwen2.5-0.5b --workload S --folder FOLDER

The JSON object has the form of ``decode.py``'s. A repeat generates the whole workload from other
prompts. One engine generates all workloads, one after the other; the first repeats of the first one
are not counted. Text is not made of the tokens, and without ``--logprobs`` no log-prob is returned,
which is less work than tandem's engine does.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import vllm

sys.path.append(str(Path(__file__).parents[1]))
from processes import children_end  # noqa: E402 - of the folder above

GRAPH_SEQUENCES = 512
"""Up to so many sequences vLLM captures graphs of its own accord."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--workload", nargs="+", default=["S"])
    parser.add_argument("--folder", type=Path, required=True, help="made by grpo_step.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="repeats that are not counted")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--gpu-memory", type=float, default=0.85)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--logprobs", action="store_true", help="of the sampled tokens")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def engine_settings(options: argparse.Namespace, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest settings of ``vllm.LLM``. The model is one that ends, if any task asks."""
    model = next((task for task in tasks if task["mean_response"] is not None), tasks[0])["model"]
    most = max(task["prompts"] * task["samples"] for task in tasks)
    sequences = min(most, options.max_num_seqs)
    chosen = {
        "model": str(options.folder / model),
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": max(task["prompt"] + task["response"] for task in tasks),
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory,
        "enable_prefix_caching": not options.no_prefix_caching,
        "disable_log_stats": True,
    }
    if sequences > GRAPH_SEQUENCES:
        chosen["compilation_config"] = {"max_cudagraph_capture_size": sequences}
    return chosen


def sampling_settings(options: argparse.Namespace, task: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of ``vllm.SamplingParams``."""
    fixed_length = task["mean_response"] is None
    return {
        "n": task["samples"],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": task["response"],
        "ignore_eos": fixed_length,
        "stop_token_ids": [] if fixed_length else [task["end_id"]],
        "logprobs": 0 if options.logprobs else None,
        "detokenize": False,
    }


def read_prompts(place: Path) -> list[list[int]]:
    """Token ids: every word is the number of its token."""
    rows = map(json.loads, (place / "prompts.jsonl").read_text().splitlines())
    return [[int(word) for word in row["prompt"][0]["content"].split()] for row in rows]


def batches(prompts: list[list[int]], size: int, *, repeats: int) -> list[list[dict[str, Any]]]:
    """Other prompts in every repeat, as far as the file reaches."""
    num_batches = len(prompts) // size
    starts = [repeat % num_batches * size for repeat in range(repeats)]
    return [[{"prompt_token_ids": ids} for ids in prompts[i : i + size]] for i in starts]


def run(
    engine: vllm.LLM, place: Path, *, task: dict[str, Any], options: argparse.Namespace, warmup: int
) -> dict[str, Any]:
    """Measure one row of the table."""
    sampled = sampling_settings(options, task)
    seconds, counts = [], []
    repeats = warmup + options.repeats
    for batch in batches(read_prompts(place), task["prompts"], repeats=repeats):
        begin = time.perf_counter()
        results = engine.generate(batch, vllm.SamplingParams(**sampled), use_tqdm=False)
        seconds.append(time.perf_counter() - begin)
        counts.append(sum(len(out.token_ids) for result in results for out in result.outputs))
        print(f"{counts[-1]} tokens, {seconds[-1]:.2f} s", flush=True)
    rates = [count / second for count, second in zip(counts, seconds, strict=True)][warmup:]
    median_s = statistics.median(seconds[warmup:])
    return {
        "settings": task,
        "sampling_settings": sampled,
        "tokens_per_s": statistics.median(rates),
        "all_tokens_per_s": rates,
        "seconds": median_s,
        "all_seconds": seconds,
        "tokens": statistics.median(counts[warmup:]),
        "seconds_per_position": median_s / task["response"],
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    places = [options.folder / f"{options.model}-{workload}" for workload in options.workload]
    tasks = [json.loads((place / "task.json").read_text()) for place in places]
    chosen = engine_settings(options, tasks)
    begin = time.perf_counter()
    engine = vllm.LLM(**chosen)
    ready_s = time.perf_counter() - begin
    on_gpu = torch.cuda.is_available()
    rows = []
    for index, (workload, place, task) in enumerate(
        zip(options.workload, places, tasks, strict=True)
    ):
        warmup = 0 if index else options.warmup
        row = run(engine, place, task=task, options=options, warmup=warmup)
        rows.append({"model": options.model, "workload": workload, **row})
        print(f"{options.model} {workload}: {row['tokens_per_s']:,.0f} tokens/s", flush=True)
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    report = {
        "benchmark": "decode",
        "system": "vllm",
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {module.__name__: module.__version__ for module in (vllm, torch)},
        "command": "python " + " ".join(sys.argv),
        "engine_settings": chosen,
        "ready_s": ready_s,
        "device_gib": (total - free) / 2**30,
        "rows": rows,
    }
    text = json.dumps(report, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n")
    for row in rows:
        print(
            f"{row['model']} {row['workload']}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['seconds']:.2f} s, ready after {ready_s:.0f} s"
        )


if __name__ == "__main__":
    main()
