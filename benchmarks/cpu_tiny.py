# SPDX-License-Identifier: Apache-2.0
"""Two small GRPO jobs on one CPU thread, tandem beside TRL in one run, whole processes in turn.

(a) ``quickstart``: the quickstart's GRPO job (32 prompts x 8 samples, 2 optimizer steps) from its
warm start. (b) ``fixed``: 2 layers x 64, vocabulary 512, 8 prompts x 8 samples, prompt 16, response
32 fixed, 20 steps.

    python benchmarks/cpu_tiny.py --peer-python PATH [--job quickstart fixed] [--repeats 3]
    [--output FILE]

``--peer-python`` is a Python with trl, datasets and the same torch. Prints a table and one JSON
object. Steps are wall-clock from the end of one to the end of the next; the first two of each run
are warm-up and not counted.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from fixed_task import write_task
from processes import children_end, start

from tandem.quickstart.command import warm_start
from tandem.quickstart.materials import prepare

HERE = Path(__file__).parent
NUM_WARMUP = 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Job:
    """A workload for both systems. ``options`` are tandem's further overrides."""

    model: Path
    prompts: Path
    steps: int
    num_prompts: int
    num_samples: int
    response_length: int
    minibatches: int
    lr: float
    fixed_length: bool
    options: tuple[str, ...]


@dataclass(frozen=True)
class Timing:
    """The seconds of a process: of its counted steps, and of the whole process."""

    step_s: list[float]
    process_s: float


def quickstart_job(folder: Path) -> Job:
    """The model after the warm start, and the training prompts."""
    materials = prepare(folder / "materials", seed=0)
    return Job(
        model=warm_start(materials, folder / "sft", seed=0),
        prompts=materials.train,
        steps=60,
        num_prompts=32,
        num_samples=8,
        response_length=40,
        minibatches=2,
        lr=3e-4,
        fixed_length=False,
        options=(),
    )


def fixed_job(folder: Path) -> Job:
    """A random model of another vocabulary, prompts of 16 tokens, responses of exactly 32."""
    model, prompts, reward = write_task(folder)
    return Job(
        model=model,
        prompts=prompts,
        steps=20,
        num_prompts=8,
        num_samples=8,
        response_length=32,
        minibatches=1,
        lr=3e-4,
        fixed_length=True,
        options=(f"custom_reward_function.path={reward}", "data.max_prompt_length=16"),
    )


JOBS = {"quickstart": quickstart_job, "fixed": fixed_job}


def run_tandem(job: Job, folder: Path) -> Timing:
    """``tandem train`` as a user starts it."""
    command = [
        *(sys.executable, "-m", "tandem.cli.main", "train"),
        f"actor_rollout_ref.model.path={job.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        f"data.train_files={job.prompts}",
        "data.val_files=[]",
        f"data.train_batch_size={job.num_prompts}",
        f"data.max_response_length={job.response_length}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={job.num_prompts // job.minibatches}",
        f"actor_rollout_ref.actor.optim.lr={job.lr}",
        "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
        "actor_rollout_ref.actor.optim.weight_decay=0",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=5",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        f"actor_rollout_ref.rollout.n={job.num_samples}",
        f"actor_rollout_ref.rollout.ignore_eos={job.fixed_length}",
        "algorithm.rollout_correction.bypass_mode=True",
        f"trainer.total_training_steps={job.steps}",
        f"trainer.default_local_dir={folder}",
        "trainer.save_freq=0",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[]",
        *job.options,
    ]
    process_s = timed(command)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    tokens = [r["perf/total_num_tokens"] / r["perf/wall_throughput"] for r in records]
    return Timing(tokens[NUM_WARMUP:], process_s)


def run_trl(job: Job, folder: Path, *, python: str) -> Timing:
    """The same job in TRL."""
    output = folder / "trl.json"
    command = [
        *(python, str(HERE / "peers" / "trl_cpu.py")),
        *("--model", str(job.model), "--prompts", str(job.prompts)),
        *("--steps", str(job.steps), "--num-prompts", str(job.num_prompts)),
        *("--num-samples", str(job.num_samples), "--minibatches", str(job.minibatches)),
        *("--response-length", str(job.response_length), "--lr", str(job.lr)),
        *(("--fixed-length",) if job.fixed_length else ()),
    ]
    process_s = timed(command, output)
    result = json.loads(output.read_text().splitlines()[-1])
    return Timing(result["step_s"][NUM_WARMUP:], process_s)


def timed(command: list[str], output: Path | None = None) -> float:
    """Seconds of a whole process; its stdout goes to ``output``."""
    begin = time.perf_counter()
    process = start(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate()
    seconds = time.perf_counter() - begin
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed:\n{stderr[-3000:]}")
    if output is not None:
        output.write_text(stdout)
    return seconds


def summarise(timings: list[Timing]) -> dict[str, float]:
    steps = [second for timing in timings for second in timing.step_s]
    return {
        "step_s_median": round(statistics.median(steps), 4),
        "step_s_mean": round(statistics.fmean(steps), 4),
        "process_s_median": round(statistics.median(t.process_s for t in timings), 2),
    }


def compare(name: str, options: argparse.Namespace, *, folder: Path) -> dict[str, object]:
    job = JOBS[name](folder)
    ours: list[Timing] = []
    theirs: list[Timing] = []
    for repeat in range(options.repeats):
        ours.append(run_tandem(job, folder / f"run_{repeat}"))
        if options.peer_python:
            theirs.append(run_trl(job, folder, python=options.peer_python))
    tandem = summarise(ours)
    if not theirs:
        return {"tandem": tandem}
    trl = summarise(theirs)
    ratios = {key: round(trl[key] / tandem[key], 2) for key in tandem}
    return {"tandem": tandem, "trl": trl, "trl_over_tandem": ratios}


@children_end()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", help="without it, only tandem is timed")
    parser.add_argument("--job", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write the JSON object here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        jobs = {}
        for name in options.job:
            folder = Path(temporary) / name
            folder.mkdir()
            jobs[name] = compare(name, options, folder=folder)
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "command": "python " + " ".join(sys.argv),
        "threads": 1,
        "jobs": jobs,
    }
    for name, job in jobs.items():
        for system, figures in job.items():
            print(f"{name:12} {system:16} {figures}")
    print(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
