# SPDX-License-Identifier: Apache-2.0
"""The keyed draw of a decode step, as an engine over vLLM makes it on vLLM's logits.

    python benchmarks/draws.py [--rows 8 64 512 1024] [--vocabulary 151936] [--output FILE]

Prints one JSON object and a line for each number of rows: milliseconds from the logits to logits
that leave only the drawn tokens, with the upload of random numbers, and milliseconds of a plain
draw by softmax and exponential noise, which vLLM makes in its place. A decode step has one draw.
"""

import argparse
from pathlib import Path

import torch
from measure import describe, median_s, tell
from processes import children_end
from torch import Tensor

from tandem.platforms.select import select_platform
from tandem.rollout import sampler
from tandem.rollout.paged.kernels import sampling
from tandem.rollout.sampler import DrawRule
from tandem.rollout.vllm.draw import DrawnLogProbs, Rows, Stream

RULE = DrawRule(temperature=1.0, top_k=-1, top_p=1.0)
NUM_TOKENS = 256
"""Each row has drawn so many tokens before."""


def keyed_draw(num_rows: int, device: torch.device) -> Rows:
    """Return the draws of a batch of sequences."""
    draw_rows = sampler.draw_rows if device.type == "cpu" else sampling.KernelDraws()
    rows = Rows(draw_rows, log_probs=DrawnLogProbs())
    for index in range(num_rows):
        stream = Stream(index, RULE, log_probs=[0.0] * NUM_TOKENS)
        rows.add(index, stream, token_ids=range(NUM_TOKENS))
    return rows


def plain_draw(logits_BV: Tensor) -> Tensor:
    """Return tokens drawn with exponential noise."""
    prob_BV = torch.softmax(logits_BV, dim=-1)
    return prob_BV.div_(torch.empty_like(prob_BV).exponential_()).argmax(dim=-1)


def measure(num_rows: int, vocabulary: int) -> dict[str, float]:
    """Return the milliseconds of a step's draws."""
    device = torch.device(select_platform("auto").device_type)
    generator = torch.Generator(device).manual_seed(0)
    logits_BV = torch.randn(num_rows, vocabulary, device=device, generator=generator)
    rows = keyed_draw(num_rows, device)
    # The draw overwrites its logits, as vLLM's processors may.
    keyed_s = median_s(lambda: rows.draw(logits_BV.clone()), repeats=30)
    plain_s = median_s(lambda: plain_draw(logits_BV.clone()), repeats=30)
    return {"rows": num_rows, "keyed_ms": keyed_s * 1e3, "plain_ms": plain_s * 1e3}


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64, 512, 1024])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = [measure(num_rows, options.vocabulary) for num_rows in options.rows]
    report = {"benchmark": "draws", **describe(), "vocabulary": options.vocabulary, "rows": rows}
    tell(report, options.output)
    for row in rows:
        print(f"{row['rows']} rows: {row['keyed_ms']:.3f} ms, plain {row['plain_ms']:.3f} ms")


if __name__ == "__main__":
    main()
