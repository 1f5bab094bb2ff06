# SPDX-License-Identifier: Apache-2.0
"""Memory, descriptors and records of a run over many steps.

    python benchmarks/long_runs.py [--modes sync async two split] [--steps 5000] [--keys KEY=VALUE]
    [--folder FOLDER] [--output FILE]

``sync`` and ``async`` (a lag of 1, in turns) are one process, ``two`` are two processes that share
all tasks, and ``split`` is asynchronous with one process that trains and one that generates. The
model has one layer; a step has 2 prompts x 2 samples x 4 tokens, and every 200 steps are validated
and saved. Each second, the resident memory and the open descriptors of all processes of the run and
the sizes of its files are read. Slopes are least squares over the steps after the warm-up. Prints
a JSON object after each mode, with all modes so far.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pyarrow
from fixed_task import REWARD
from measure import describe, tell
from processes import children_end, start
from pyarrow import parquet

from tandem.quickstart.model import ModelSize, write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer

WARMUP_SHARE = 0.2
INTERVAL_S = 1.0
SAVED_STEPS = 200
SIZE = ModelSize(hidden=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate=32)
VOCABULARY = 300
ASYNC = (
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
    "actor_rollout_ref.hybrid_engine=False",
)
TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")
TURNS = (
    "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
    "trainer.separated_node_ratios=[1.0]",
)
MODES = {"sync": (), "async": (*ASYNC, *TURNS), "two": TWO, "split": (*TWO, *ASYNC)}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Series:
    """The values of one quantity by step."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self.steps.append(step)
        self.values.append(value)

    def after(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and the values from a step on."""
        steps, values = np.array(self.steps), np.array(self.values)
        return steps[steps >= step], values[steps >= step]


@dataclass
class Samples:
    """All that was read of a run: bytes and descriptors by process, bytes by file."""

    memory: dict[str, Series] = field(default_factory=dict)
    descriptors: dict[str, Series] = field(default_factory=dict)
    files: dict[str, Series] = field(default_factory=dict)


def write_task(folder: Path) -> tuple[Path, Path, Path]:
    """Write a tiny model, prompts and a reward; return their paths."""
    model, prompts, reward = folder / "model", folder / "train.parquet", folder / "reward.py"
    model.mkdir(parents=True)
    save_tokenizer(train_tokenizer(["0 1 2 3 4 5 6 7 8 9"]), model)
    write_model(model, num_tokens=VOCABULARY, eos_id=END_ID, pad_id=PAD_ID, seed=0, size=SIZE)
    rows = [
        {
            "data_source": "long",
            "prompt": f"{index % 10}",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(64)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), prompts)
    reward.write_text(REWARD)
    return model, prompts, reward


def make_command(mode: str, options: argparse.Namespace, *, folder: Path) -> list[str]:
    """Return the command of a run."""
    model, prompts, reward = write_task(folder / "task")
    return [
        *(sys.executable, "-m", "tandem.cli.main", "train"),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        f"custom_reward_function.path={reward}",
        "reward.num_workers=1",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.val_max_samples=2",
        "data.train_batch_size=2",
        "data.max_prompt_length=8",
        "data.max_response_length=4",
        "trainer.total_epochs=1000000",
        f"trainer.total_training_steps={options.steps}",
        f"trainer.save_freq={SAVED_STEPS}",
        f"trainer.test_freq={SAVED_STEPS}",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.logger=[file]",
        f"trainer.default_local_dir={folder / 'run'}",
        *MODES[mode],
        *options.keys,
    ]


def name_of(process: psutil.Process) -> str:
    """Return the role of a process of a run."""
    words = " ".join(process.cmdline())
    for part in ("ray::", "raylet", "gcs_server", "dashboard", "runtime_env", "log_monitor"):
        if part in words:
            # Ray appends the method that a worker is called with.
            return words.split()[0].partition(".")[0] if part == "ray::" else part
    for part in ("resource_tracker", "forkserver", "spawn_main", "ray.scripts"):
        if part in words:
            return part
    return "driver" if "tandem.cli.main" in words else "child"


def named(run: psutil.Process) -> dict[str, psutil.Process]:
    """Return all processes of a run by names that are unique and stay the same."""
    found: dict[str, psutil.Process] = {}
    processes = [run]
    with suppress(psutil.NoSuchProcess):
        processes += run.children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            found[f"{name_of(process)} {process.pid}"] = process
    return found


def read_sample(samples: Samples, run: psutil.Process, *, step: int, folder: Path) -> None:
    """Add what the processes and the files take now."""
    total_bytes = total_descriptors = 0
    for name, process in named(run).items():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            memory, descriptors = process.memory_info().rss, process.num_fds()
            samples.memory.setdefault(name, Series()).add(step, memory)
            samples.descriptors.setdefault(name, Series()).add(step, descriptors)
            total_bytes += memory
            total_descriptors += descriptors
    samples.memory.setdefault("all", Series()).add(step, total_bytes)
    samples.descriptors.setdefault("all", Series()).add(step, total_descriptors)
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_file():
            with suppress(FileNotFoundError):
                samples.files.setdefault(path.name, Series()).add(step, path.stat().st_size)


class StepCounter:
    """The number of complete steps on record, read as the file grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._step = 0

    def read(self) -> int:
        """Return the last step on record."""
        if self._path.exists():
            with self._path.open("rb") as stream:
                stream.seek(self._position)
                lines = stream.read().rpartition(b"\n")[0].splitlines()
                self._position += sum(len(line) + 1 for line in lines)
            self._step = max((json.loads(line)["step"] for line in lines), default=self._step)
        return self._step


def slope(series: Series, *, warmup: int) -> float:
    """Return the change for each step after the warm-up; 0 for fewer than three samples."""
    steps, values = series.after(warmup)
    return float(np.polyfit(steps, values, 1)[0]) if len(set(steps.tolist())) > 2 else 0.0


def measure(mode: str, options: argparse.Namespace, *, folder: Path) -> dict[str, object]:
    """Run one mode to its end and return its figures."""
    samples, counter = Samples(), StepCounter(folder / "run/metrics.jsonl")
    command = make_command(mode, options, folder=folder)
    output = folder / "output.txt"
    begin = time.monotonic()
    with output.open("w") as stream:
        process = start(command, env=ENVIRONMENT, stdout=stream, stderr=subprocess.STDOUT)
        run = psutil.Process(process.pid)
        while process.poll() is None:
            step = counter.read()
            if step < options.steps:  # then processes end
                read_sample(samples, run, step=step, folder=folder / "run")
            time.sleep(INTERVAL_S)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed:\n{output.read_text()[-3000:]}")
    return {
        "seconds": round(time.monotonic() - begin),
        **summarise(samples, num_steps=counter.read()),
    }


def summarise(samples: Samples, *, num_steps: int) -> dict[str, object]:
    """Return slopes and ranges after the warm-up, for the processes that last."""
    warmup = int(num_steps * WARMUP_SHARE)
    lasting = [name for name, series in samples.memory.items() if is_lasting(series, num_steps)]
    shown = {name: f"{number} {name.rpartition(' ')[0]}" for number, name in enumerate(lasting)}
    shown["all"] = "all"
    return {
        "steps": num_steps,
        "warmup_steps": warmup,
        "memory_bytes_per_step": {
            shown[name]: round(slope(samples.memory[name], warmup=warmup), 1) for name in lasting
        },
        "memory_mib": {
            shown[name]: extent(samples.memory[name], warmup, unit=2**20) for name in lasting
        },
        "descriptors": {
            shown[name]: extent(samples.descriptors[name], warmup, unit=1) for name in lasting
        },
        "file_bytes_per_step": {
            name: round(slope(series, warmup=warmup), 1)
            for name, series in sorted(samples.files.items())
        },
    }


def is_lasting(series: Series, num_steps: int) -> bool:
    """Return whether a process lived through most of the run."""
    return series.steps[0] <= WARMUP_SHARE * num_steps and series.steps[-1] >= 0.9 * num_steps


def extent(series: Series, warmup: int, *, unit: int) -> Mapping[str, float]:
    """Return the first, the least, the greatest and the last value after the warm-up."""
    _, values = series.after(warmup)
    found: Sequence[float] = (values / unit).round(1).tolist()
    return {"first": found[0], "least": min(found), "most": max(found), "last": found[-1]}


@children_end()
def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--keys", nargs="*", default=[], help="further keys of tandem")
    parser.add_argument("--folder", type=Path, help="keep the folders of the runs there")
    parser.add_argument("--output", type=Path, help="write the JSON object here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = options.folder or Path(temporary)
        modes: dict[str, object] = {}
        for mode in options.modes:
            modes[mode] = measure(mode, options, folder=folder / mode)
            tell({"benchmark": "long_runs", **describe(), "modes": modes}, options.output)


if __name__ == "__main__":
    main()
