# SPDX-License-Identifier: Apache-2.0
"""Losses and rates of one model that is divided over devices in several ways.

    python benchmarks/layouts.py --model olmoe-7b --devices 2 --folder FOLDER \\
        --layout "" engine.expert_model_parallel_size=2 engine.tensor_model_parallel_size=2

Every layout is a run of ``tandem sft`` with the same random weights (``grpo_step.py``), the same
random demonstrations and further keys, several of which are joined by commas. Prints one JSON
object, and for each layout its tokens per second and how far its losses are from the first one's.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_step import MODELS, prepare
from measure import describe, tell
from processes import children_end, start
from shapes import EOS_ID, VISION_IDS

NUM_WARMUP = 2
"""Steps that are not counted in the rate."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="qwen2.5-0.5b", choices=MODELS)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--layout", nargs="+", default=[""], help="keys, joined by commas")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64, help="of an optimizer step")
    parser.add_argument("--words", type=int, default=256, help="of a prompt, and of a response")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--balanced", action="store_true", help="see grpo_step.py")
    parser.add_argument("--folder", type=Path, help="of the model; else a temporary one")
    parser.add_argument("--output", type=Path)
    parser.add_argument("keys", nargs="*", help="further keys of all runs")
    return parser.parse_intermixed_args()


def write_demonstrations(path: Path, options: argparse.Namespace) -> None:
    """Write random prompts and responses, every one of the same number of words."""
    rng = random.Random(0)
    first = 1 + max(EOS_ID, *VISION_IDS.values())
    numbers = range(
        min(first, MODELS[options.model].vocabulary - 100), MODELS[options.model].vocabulary
    )
    with path.open("w") as lines:
        for _ in range(options.steps * options.rows):
            texts = (" ".join(map(str, rng.choices(numbers, k=options.words))) for _ in range(2))
            lines.write(json.dumps(dict(zip(("question", "answer"), texts, strict=True))) + "\n")


def run(layout: str, options: argparse.Namespace, *, model: Path, data: Path) -> dict[str, Any]:
    """Train in one layout. Return its losses and rates."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) / "run"
        command = [
            *(sys.executable, "-m", "tandem.cli.main", "sft"),
            f"data.train_files={data}",
            f"data.train_batch_size={options.rows}",
            "data.use_dynamic_bsz=True",
            f"data.max_token_len_per_gpu={options.budget}",
            f"data.max_length={2 * options.words + 1}",
            f"model.partial_pretrain={model}",
            f"trainer.n_gpus_per_node={options.devices}",
            f"trainer.total_training_steps={options.steps}",
            f"trainer.default_local_dir={folder}",
            "trainer.save_freq=0",
            *filter(None, layout.split(",")),
            *options.keys,
        ]
        log = folder.with_suffix(".log")
        with log.open("w") as stream:
            code = start(command, stdout=stream, stderr=subprocess.STDOUT).wait()
        if code != 0:
            sys.exit(f"{' '.join(command)}\nfailed:\n{log.read_text()[-4000:]}")
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [row for row in map(json.loads, lines) if "train/loss" in row]
    rates = [row["perf/wall_throughput"] for row in records[NUM_WARMUP:]]
    return {
        "layout": layout,
        "losses": [row["train/loss"] for row in records],
        "grad_norms": [row["train/grad_norm"] for row in records],
        "tokens_per_s": statistics.median(rates),
    }


@children_end()
def main() -> None:
    """See the module docstring."""
    options = parse()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        options.workload = "S"
        task = prepare((options.folder or Path(temporary)).resolve(), options)
        model = task.parent / json.loads((task / "task.json").read_text())["model"]
        data = Path(temporary) / "demonstrations.jsonl"
        write_demonstrations(data, options)
        rows = []
        for layout in options.layout:
            row = run(layout, options, model=model, data=data)
            first = rows[0] if rows else row
            pairs = zip(row["losses"], first["losses"], strict=True)
            row["largest_difference"] = max(abs(one - other) for one, other in pairs)
            rows.append(row)
            print(
                f"{options.model} {layout or 'FSDP2'}: {row['tokens_per_s']:,.0f} tokens/s, losses "
                f"within {row['largest_difference']:.1e}",
                flush=True,
            )
    settings = {
        name: getattr(options, name) for name in ("devices", "steps", "rows", "words", "budget")
    }
    report = {"benchmark": "layouts", **describe(), "model": options.model, **settings}
    tell(report | {"layouts": rows}, options.output)


if __name__ == "__main__":
    main()
