# SPDX-License-Identifier: Apache-2.0
"""Small runs in every format that ``tandem compare`` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.metrics.jsonl import BEFORE_FIRST_STEP, METRICS_FILE, JsonLinesFile
from tandem.metrics.tensorboard_sink import TensorBoardSink
from tandem.types import StepReport

Columns = Mapping[str, Sequence[float]]
REWARD, LOSS, SECONDS, THROUGHPUT = (
    "critic/rewards/mean",
    "train/loss",
    "perf/time_per_step",
    "perf/throughput",
)

REWARDS_A = (0.10, 0.20, 0.30, 0.40, 0.50, 0.60)
REWARDS_B = (0.12, 0.19, 0.30, 0.44, 0.48, 0.63)
"""Differences of 2, -1, 0, 4, -2 and 3 percent: 2 % in the mean without signs, 1 % with them."""
A = {
    REWARD: REWARDS_A,
    THROUGHPUT: (100.0, 200.0, 300.0, 400.0, 500.0, 500.0),
    SECONDS: (9.0, 4.0, 3.0, 2.0, 1.0, 1.0),
}
B = {
    REWARD: REWARDS_B,
    THROUGHPUT: (50.0, 100.0, 150.0, 200.0, 400.0, 400.0),
    SECONDS: (18.0, 8.0, 6.0, 4.0, 2.0, 2.0),
}


def rows(columns: Columns, *, first_step: int = 1) -> list[tuple[int, dict[str, float]]]:
    """Step by step."""
    length = max(map(len, columns.values()))
    return [
        (first_step + i, {name: values[i] for name, values in columns.items() if i < len(values)})
        for i in range(length)
    ]


def write_json(folder: Path, columns: Columns, *, first_step: int = 1) -> Path:
    """A run folder of ours, its first record a validation without a training step."""
    file = JsonLinesFile(folder / METRICS_FILE, keep_through_step=BEFORE_FIRST_STEP)
    file.append({"step": 0, "val-core/gsm8k/acc/mean@1": 0.5})
    for step, metrics in rows(columns, first_step=first_step):
        file.append({"step": step, **metrics})
    file.close()
    return folder


def write_events(folder: Path, columns: Columns) -> Path:
    """What our TensorBoard sink leaves, in a folder with a name of verl's."""
    sink = TensorBoardSink(folder, first_step=1)
    for step, metrics in rows(columns):
        sink.write(StepReport(step=step, metrics=metrics))
    sink.close()
    return folder


def write_console(file: Path, columns: Columns) -> Path:
    """A log as verl's jobs leave it: Ray's coloured prefix, a progress bar in the same line, values
    as NumPy shows them, and lines that only look like a step's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ["(TaskRunner pid=42) training/global_step:1 - not a step", "step: 3 of 7"]
    for step, metrics in rows(columns):
        fields = [f"{name}:np.float64({value})" for name, value in metrics.items()]
        text = " - ".join([f"step:{step}", *fields, "actor/lr:1e-06", "val/sample:[1, 2]"])
        bar = f"Training Progress:  {step}%|  | {step}/9 [00:10<01:00]\r" if step % 2 else ""
        lines.append(f"{bar}\x1b[36m(TaskRunner pid=42)\x1b[0m {text}")
    file.write_text("\n".join(lines) + "\n")
    return file
