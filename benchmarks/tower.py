# SPDX-License-Identifier: Apache-2.0
"""The vision tower of Qwen2.5-VL on one accelerator: forward, and forward with backward.

    python benchmarks/tower.py [--patches 4096 16384 32768] [--repeats 5] [--output FILE]

Weights are random and in bf16. Pictures have 1024 x 768 pixels, and so many are looked at together
that they have at least ``--patches`` patches. MFU counts the products and attention within windows
and pictures, three times for forward with backward, against 989 TFLOP/s.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import describe, median_s, peak_gib, tell
from processes import children_end
from shapes import PEAK_FLOPS, SHAPES, TOKEN_SIDE, tower_flops

from tandem.models.operators import operators_for
from tandem.models.vision import VisionTower
from tandem.pictures import Picture
from tandem.platforms.select import select_platform

ROWS, COLUMNS = 27, 37
"""The tokens of a picture of 1024 x 768 pixels."""
PATCHES = 4 * ROWS * COLUMNS


def make_tower() -> VisionTower:
    """The tower of Qwen2.5-VL-7B with random weights."""
    vision = SHAPES["qwen2.5-vl-7b"].decoder_config().vision
    assert vision is not None
    device = select_platform("auto").device_type
    with torch.device("meta"):
        tower = VisionTower(vision)
    tower.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for weight in tower.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 0.02, generator=generator)
            else:
                weight.fill_(1.0)
    return tower


def run(tower: VisionTower, wanted: int, *, repeats: int) -> dict[str, object]:
    """Measure one row of the table."""
    count = -(-wanted // PATCHES)
    pixels = bytes(range(256)) * (ROWS * COLUMNS * TOKEN_SIDE**2 * 3 // 256 + 1)
    pixels = pixels[: ROWS * COLUMNS * TOKEN_SIDE**2 * 3]
    pictures = [Picture(i * PATCHES, ROWS, COLUMNS, TOKEN_SIDE, pixels) for i in range(count)]
    look = partial(tower.look, pictures, operators=operators_for(select_platform("auto")))
    floating = tower_flops(count * PATCHES, of_pictures=count)

    def forward() -> None:
        with torch.no_grad():
            look()

    def both() -> None:
        look().embeddings.sum().backward()
        tower.zero_grad()

    torch.accelerator.reset_peak_memory_stats()
    jobs: dict[str, tuple[Callable[[], None], int]] = {"forward": (forward, 1), "both": (both, 3)}
    row: dict[str, object] = {"patches": count * PATCHES, "pictures": count}
    for name, (job, times) in jobs.items():
        seconds = median_s(job, repeats)
        row |= {f"{name}_s": seconds, f"{name}_mfu_989": times * floating / seconds / PEAK_FLOPS}
    return {**row, "peak_gib": peak_gib()}


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--patches", nargs="+", type=int, default=[4096, 16384, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tower, rows = make_tower(), []
    for wanted in arguments.patches:
        row = run(tower, wanted, repeats=arguments.repeats)
        rows.append(row)
        print(
            f"{row['patches']} patches: forward {row['forward_s']:.3f} s "
            f"({row['forward_mfu_989']:.1%} MFU), with backward {row['both_s']:.3f} s "
            f"({row['both_mfu_989']:.1%}), {row['peak_gib']:.1f} GiB",
            flush=True,
        )
    tell({"benchmark": "tower", **describe(), "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
