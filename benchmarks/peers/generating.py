# SPDX-License-Identifier: Apache-2.0
"""The measurement of a peer's generation, for the scripts of this folder. Needs torch only.

A repeat generates the whole workload from other prompts. One engine generates all workloads, one
after the other; the first repeats of each are not counted.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

Task = dict[str, Any]
Generate = Callable[[list[list[int]], Task], list[int]]
"""Generates the samples of prompts, and returns the number of tokens of each."""


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of what the scripts have in common."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--workload", nargs="+", default=["S"])
    parser.add_argument("--folder", type=Path, required=True, help="made by grpo_step.py")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="repeats that are not counted")
    parser.add_argument("--gpu-memory", type=float, default=0.85)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--logprobs", action="store_true", help="of the sampled tokens")
    parser.add_argument("--output", type=Path)
    parser.add_argument("settings", nargs="*", help="further arguments of the engine: NAME=VALUE")
    return parser


def further_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the further arguments of the engine. Values that are not JSON are text."""
    chosen: dict[str, Any] = {}
    for setting in options.settings:
        name, equals, text = setting.partition("=")
        if not equals:
            sys.exit(f"{setting}: not NAME=VALUE. Give an argument of the engine and its value.")
        try:
            chosen[name] = json.loads(text)
        except ValueError:
            chosen[name] = text
    return chosen


def places(options: argparse.Namespace) -> list[Path]:
    """Return the folders of the workloads."""
    return [options.folder / f"{options.model}-{workload}" for workload in options.workload]


def read_tasks(options: argparse.Namespace) -> list[Task]:
    """Return the sizes of the workloads."""
    return [json.loads((place / "task.json").read_text()) for place in places(options)]


def model_folder(options: argparse.Namespace, tasks: list[Task]) -> str:
    """Return the model of the workloads: one that ends its responses, if any asks for it."""
    chosen = next((task for task in tasks if task["mean_response"] is not None), tasks[0])
    return str(options.folder / chosen["model"])


def most_sequences(tasks: list[Task]) -> int:
    """Return the number of sequences of the largest workload."""
    return max(task["prompts"] * task["samples"] for task in tasks)


def longest(tasks: list[Task]) -> int:
    """Return the number of tokens of the longest sequence of any workload."""
    return max(task["prompt"] + task["response"] for task in tasks)


def read_prompts(place: Path) -> list[list[int]]:
    """Return token ids: every word is the number of its token."""
    rows = map(json.loads, (place / "prompts.jsonl").read_text().splitlines())
    return [[int(word) for word in row["prompt"][0]["content"].split()] for row in rows]


def batches(prompts: list[list[int]], size: int, *, repeats: int) -> list[list[list[int]]]:
    """Return the prompts of each repeat: others, as far as the file reaches."""
    num_batches = len(prompts) // size
    starts = [repeat % num_batches * size for repeat in range(repeats)]
    return [prompts[i : i + size] for i in starts]


@dataclass(frozen=True)
class Peer:
    """A running engine.

    Attributes:
        modules: its module first, and others whose versions are reported.
        settings: the arguments of the engine.
        ready_s: the seconds that it took to start.
        generate: generates the samples of prompts.
        sampling: returns its settings of sampling for a workload.
    """

    modules: Sequence[ModuleType]
    settings: dict[str, Any]
    ready_s: float
    generate: Generate
    sampling: Callable[[Task], dict[str, Any]]


def run(options: argparse.Namespace, tasks: list[Task], *, peer: Peer) -> None:
    """Measure all workloads, and print the report as JSON and in a line for each.

    The file is written after each workload, as an engine may not survive the next one.
    """
    rows: list[Task] = []
    found: dict[str, Any] = {}
    for place, name, task in zip(places(options), options.workload, tasks, strict=True):
        row = {"model": options.model, "workload": name, "settings": task}
        rows.append({**row, **measure(options, place, task=task, peer=peer)})
        print(f"{options.model} {name}: {rows[-1]['tokens_per_s']:,.0f} tokens/s", flush=True)
        found = report(rows, peer)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    for row in rows:
        print(
            f"{row['model']} {row['workload']}: {row['tokens_per_s']:,.0f} tokens/s, "
            f"{row['seconds']:.2f} s, ready after {peer.ready_s:.0f} s"
        )


def measure(options: argparse.Namespace, place: Path, *, task: Task, peer: Peer) -> dict[str, Any]:
    """Return what one workload took."""
    warmup, seconds, counts = options.warmup, [], []
    repeats = warmup + options.repeats
    for batch in batches(read_prompts(place), task["prompts"], repeats=repeats):
        begin = time.perf_counter()
        lengths = peer.generate(batch, task)
        seconds.append(time.perf_counter() - begin)
        counts.append(sum(lengths))
        print(f"{counts[-1]} tokens, {seconds[-1]:.2f} s", flush=True)
    rates = [count / second for count, second in zip(counts, seconds, strict=True)][warmup:]
    median_s = statistics.median(seconds[warmup:])
    return {
        "tokens_per_s": statistics.median(rates),
        "all_tokens_per_s": rates,
        "seconds": median_s,
        "all_seconds": seconds,
        "tokens": statistics.median(counts[warmup:]),
        "seconds_per_position": median_s / task["response"],
        "sampling_settings": peer.sampling(task),
    }


def report(rows: list[Task], peer: Peer) -> dict[str, Any]:
    """Return the JSON object."""
    on_gpu = torch.cuda.is_available()
    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    return {
        "benchmark": "decode",
        "system": peer.modules[0].__name__,
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {module.__name__: module.__version__ for module in peer.modules},
        "command": "python " + " ".join(sys.argv),
        "engine_settings": peer.settings,
        "ready_s": peer.ready_s,
        "device_gib": (total - free) / 2**30,
        "rows": rows,
    }
