# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer in generation: tandem's kernels beside torch's operators.

    python benchmarks/experts.py [--model qwen3-30b-a3b] [--rows 1 8 64 512 4096] [--output FILE]

Each row chooses its experts at random. A time is that of all products of a layer's experts in bf16
and of the order and the sum around them, without the router, captured in a graph of so many layers
that the weights exceed the cache of the device. Bytes are those of the chosen experts' weights, of
inputs and of outputs. Prints one JSON object and a table.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import copy_rate, describe, tell
from shapes import SHAPES
from torch import Tensor

from tandem.models.operators import TORCH, RunExperts, operators_for
from tandem.platforms.select import select_platform

NUM_LAYERS, NUM_REPLAYS = 8, 20


def seconds(experts: RunExperts, inputs: list[dict[str, Any]]) -> float:
    """Return the time of one layer: the median of replays of a captured graph."""

    def layers() -> None:
        for arguments in inputs:
            experts(**arguments)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] / 1e3 / NUM_LAYERS


@torch.inference_mode()
def measure(name: str, num_rows: int) -> dict[str, object]:
    """Measure one row of the table."""
    shape, generator = SHAPES[name], torch.Generator("cuda").manual_seed(0)

    def random(sizes: tuple[int, ...]) -> Tensor:
        numbers = torch.randn(sizes, device="cuda", dtype=torch.bfloat16, generator=generator)
        return numbers * shape.hidden**-0.5

    inputs, num_bytes = [], 0
    for _ in range(NUM_LAYERS):
        scores = torch.rand(num_rows, shape.experts, device="cuda", generator=generator)
        weight_TK, expert_TK = scores.topk(shape.chosen)
        inputs.append(
            {
                "h_TD": random((num_rows, shape.hidden)),
                "expert_TK": expert_TK,
                "weight_TK": weight_TK,
                "gate_up_E2FD": random((shape.experts, 2 * shape.inner, shape.hidden)),
                "down_EDF": random((shape.experts, shape.hidden, shape.inner)),
            }
        )
        read = len(expert_TK.unique()) * 3 * shape.inner * shape.hidden
        num_bytes += 2 * (read + expert_TK.numel() * (2 * shape.hidden + 3 * shape.inner))
    ours, theirs = (
        seconds(operators.experts, inputs)
        for operators in (operators_for(select_platform("auto")), TORCH)
    )
    return {
        "model": name,
        "rows": num_rows,
        "kernels_us": 1e6 * ours,
        "torch_us": 1e6 * theirs,
        "bandwidth_share": num_bytes / NUM_LAYERS / ours / copy_rate(),
    }


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    experts = [name for name, shape in SHAPES.items() if shape.experts]
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=experts)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 512, 4096])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [measure(options.model, num_rows) for num_rows in options.rows]
    for row in rows:
        print(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            )
        )
    tell({"benchmark": "experts", **describe(), "rows": rows}, options.output)


if __name__ == "__main__":
    main()
