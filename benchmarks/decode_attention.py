# SPDX-License-Identifier: Apache-2.0
"""The attention of decode steps alone, over sequences of all ages or of one.

    python benchmarks/decode_attention.py [--model qwen2.5-0.5b ...] [--workload L S]
    [--rows 256 512 1024] [--output FILE]

Prints one JSON object and a table: microseconds a layer of captured steps, and the rate at which
keys and values are read (those that samples of a prompt share counted for each). "Shared" reads the
pages of a prompt once for several of its samples. Workloads with drawn lengths have sequences of
all ages, as they follow each other in asynchronous runs; in others all have half of their response.
Layers read caches of their own, so that none stays in the cache of the device.
"""

import argparse
import itertools
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import copy_rate, describe, median_s, tell
from processes import children_end
from shapes import SHAPES, WORKLOADS, Shape, Workload
from torch import Tensor

from tandem.platforms.select import select_platform
from tandem.rollout.paged.cache import (
    PAGE_TOKENS,
    LayerCache,
    PageDivision,
    RowState,
    RowTables,
    Tiles,
)
from tandem.rollout.paged.kernels.attention import decode_attention, divide_pages, num_programs
from tandem.rollout.paged.kernels.tiles import tile_heads

NUM_LAYERS = 4
REPEATS = 50
"""Of the layers in what is captured, beside which its launch is short."""


@dataclass(frozen=True)
class Step:
    """The tensors that the attention of a step reads."""

    q_BHE: Tensor
    k_BKE: Tensor
    v_BKE: Tensor
    caches: list[LayerCache]
    rows: RowTables

    def run(self) -> None:
        """All layers."""
        divide_pages(self.rows)
        for _ in range(REPEATS):
            for cache in self.caches:
                decode_attention(
                    self.q_BHE, self.k_BKE, v_BKE=self.v_BKE, cache=cache, rows=self.rows
                )


def positions_of(workload: Workload, num_rows: int) -> list[int]:
    """Return the position of each row's newest token, ordered by age as in the engine."""
    if workload.mean_response is None:
        return [workload.prompt + workload.response // 2] * num_rows
    rng, mean = random.Random(0), workload.mean_response
    ages = [min(int(rng.expovariate(1 / mean)), workload.response) for _ in range(num_rows)]
    return [workload.prompt + age for age in sorted(ages, reverse=True)]


def make_step(shape: Shape, workload: Workload, *, positions: list[int], shared: bool) -> Step:
    """Pages in random places; the full ones of a prompt are those of all its samples."""
    platform = select_platform("auto")
    device, num_rows = torch.device(platform.device_type), len(positions)
    num_shared = workload.prompt // PAGE_TOKENS
    counts = [position // PAGE_TOKENS + 1 for position in positions]
    free = iter(torch.randperm(sum(counts)).tolist())
    table = torch.zeros(num_rows, max(counts), dtype=torch.int32)
    for row, count in enumerate(counts):
        first = row - row % workload.samples
        common = table[first, :num_shared].tolist() if row > first else []
        own = list(itertools.islice(free, count - len(common)))
        table[row, :count] = torch.tensor(common + own)
    size = (sum(counts), shape.kv_heads, PAGE_TOKENS, shape.head_dim)
    state = RowState.allocate(num_rows, torch.device("cpu"))
    state.numbers[:, RowState.POSITION] = torch.tensor(positions)
    state.numbers[:, RowState.ACTIVE] = 1
    state.numbers[:, RowState.SHARED] = num_shared
    numbers = state.numbers.to(device)
    heads, kv_heads = shape.heads, shape.kv_heads
    programs = num_programs(
        shape.head_dim, kv_heads=kv_heads, num_multiprocessors=platform.num_multiprocessors()
    )

    itemsize = torch.bfloat16.itemsize
    in_tile = tile_heads(shape.head_dim, page_tokens=PAGE_TOKENS, itemsize=itemsize)
    tiles = Tiles.allocate(
        num_rows,
        rows_of_tile=in_tile // (heads // kv_heads),
        num_heads=heads,
        head_dim=shape.head_dim,
        device=device,
    )

    def random_states(size: tuple[int, ...]) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    return Step(
        random_states((num_rows, heads, shape.head_dim)),
        random_states((num_rows, kv_heads, shape.head_dim)),
        random_states((num_rows, kv_heads, shape.head_dim)),
        [LayerCache(random_states(size), random_states(size)) for _ in range(NUM_LAYERS)],
        RowTables(
            table.to(device),
            numbers[:, RowState.POSITION],
            numbers[:, RowState.ACTIVE],
            numbers[:, RowState.SHARED],
            PageDivision.allocate(
                num_rows,
                programs,
                num_heads=heads,
                head_dim=shape.head_dim,
                device=device,
            ),
            tiles if shared else None,
        ),
    )


def run(name: str, workload_name: str, *, num_rows: int, shared: bool) -> dict[str, object]:
    """Measure one row of the table."""
    shape, workload = SHAPES[name], WORKLOADS[workload_name]
    positions = positions_of(workload, num_rows)
    step = make_step(shape, workload, positions=positions, shared=shared)
    replay = select_platform("auto").make_capturer()(step.run)
    layer_s = median_s(replay) / REPEATS / NUM_LAYERS
    read = sum(positions) * 2 * shape.kv_heads * shape.head_dim * torch.bfloat16.itemsize
    return {
        "model": name,
        "workload": workload_name,
        "rows": num_rows,
        "shared": shared,
        "mean_context": sum(positions) / num_rows,
        "layer_us": layer_s * 1e6,
        "read_tb_per_s": read / layer_s / 1e12,
        "copy_tb_per_s": copy_rate() / 1e12,
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", nargs="+", default=["qwen2.5-0.5b"], choices=SHAPES)
    parser.add_argument("--workload", nargs="+", default=["L", "S"], choices=WORKLOADS)
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 64, 256, 512, 1024])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if min(arguments.rows) < 1:
        parser.error(f"--rows {min(arguments.rows)}: needs 1 or more")
    rows = []
    chosen = itertools.product(arguments.model, arguments.workload, arguments.rows, (False, True))
    for model, workload, num_rows, shared in chosen:
        row = run(model, workload, num_rows=num_rows, shared=shared)
        rows.append(row)
        print(
            f"{row['model']} {row['workload']}, {row['rows']} rows{', shared' if shared else ''}: "
            f"{row['layer_us']:.1f} us a layer, {row['read_tb_per_s']:.2f} TB/s",
            flush=True,
        )
    report = {"benchmark": "decode_attention", **describe(), "results": rows}
    tell(report, arguments.output)


if __name__ == "__main__":
    main()
