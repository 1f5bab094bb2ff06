# SPDX-License-Identifier: Apache-2.0
"""How fast each algorithm learns on the quickstart's tasks, with the same number of samples.

    python benchmarks/learning.py --folder FOLDER [--tasks words sorting counting]
    [--algorithms grpo dapo ...] [--seeds 0 1 2] [--steps 80 40 40] [--output FILE] [--plot FILE]
    [--hidden 1024 --layers 12 --warm-start key=value ...] [key=value ...]

Every run of a task and a seed starts from the same model, which was fine-tuned on demonstrations of
mixed quality. Keys other than those of ``ALGORITHMS`` are the quickstart's, so no rate is tuned for
an algorithm. Each run is one process with one thread. A run that is in the folder already is not
repeated. The curve is the greedy accuracy on 256 held-out problems.

``--hidden`` and ``--layers`` make a larger model of the same family, for an accelerator. The last
arguments are keys of all GRPO runs, and ``--warm-start`` those of the fine-tuning before.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measure import describe
from processes import children_end, start

from tandem.quickstart.command import warm_start
from tandem.quickstart.materials import DATA_SOURCE, TASKS, Materials, prepare
from tandem.quickstart.model import ModelSize, write_model
from tandem.quickstart.tokenizer import END_ID, PAD_ID
from tandem.report.run_folder import read_run

RECIPE = Path(__file__).parents[1] / "tandem/quickstart/grpo.yaml"
ACTOR = "actor_rollout_ref.actor"
ALGORITHMS = {
    "grpo": (f"{ACTOR}.clip_ratio_high=0.2",),
    "dapo": (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "algorithm.filter_groups.max_num_gen_batches=10",
    ),
    "ppo": (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        f"{ACTOR}.clip_ratio_high=0.2",
    ),
    "rloo": ("algorithm.adv_estimator=rloo", f"{ACTOR}.clip_ratio_high=0.2"),
    "gspo": (
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
    ),
    "grpo-fp8": (
        f"{ACTOR}.clip_ratio_high=0.2",
        "actor_rollout_ref.rollout.quantization=fp8",
    ),
    "cispo": (
        f"{ACTOR}.policy_loss.loss_mode=cispo",
        f"{ACTOR}.clip_ratio_low=10",
        f"{ACTOR}.clip_ratio_high=0.2",
    ),
}
"""The keys of each algorithm beside the quickstart's recipe."""
NOTHING_LEFT = "max_num_gen_batches"
"""A part of the error by which DAPO ends when all groups are right."""
ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@1"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

Curve = dict[int, float]
"""The accuracy by step."""


def size_of(options: argparse.Namespace) -> ModelSize | None:
    """Return the sizes of a larger model, with heads of 64 numbers; None for the quickstart's."""
    if options.hidden is None:
        return None
    heads = options.hidden // 64
    return ModelSize(
        hidden=options.hidden,
        num_layers=options.layers,
        num_heads=heads,
        num_kv_heads=max(heads // 4, 1),
        intermediate=4 * options.hidden,
    )


def warm_model(
    folder: Path, task: str, *, seed: int, options: argparse.Namespace
) -> tuple[Materials, Path]:
    """Make the files and the fine-tuned model of a task, unless they are there."""
    materials = prepare(folder / "materials", seed=seed, task=TASKS[task])
    size = size_of(options)
    if size is not None:
        vocabulary = json.loads((materials.model / "config.json").read_text())["vocab_size"]
        write_model(
            materials.model,
            num_tokens=vocabulary,
            eos_id=END_ID,
            pad_id=PAD_ID,
            seed=seed,
            size=size,
        )
    latest = folder / "sft" / "latest_checkpointed_iteration.txt"
    if latest.exists():
        return materials, folder / "sft" / f"global_step_{latest.read_text()}" / "actor"
    return materials, warm_start(materials, folder / "sft", seed=seed, keys=options.warm_start)


def train(
    folder: Path,
    materials: Materials,
    *,
    model: Path,
    algorithm: str,
    seed: int,
    steps: int,
    keys: Sequence[str],
) -> Curve:
    """Train with an algorithm, unless that run is there; return its curve."""
    if not (folder / "ended").exists():
        command = [
            *(sys.executable, "-m", "tandem", "train", str(RECIPE)),
            f"actor_rollout_ref.model.path={model}",
            f"data.train_files={materials.train}",
            f"data.val_files={materials.test}",
            f"data.seed={seed}",
            f"actor_rollout_ref.rollout.seed={seed}",
            f"trainer.default_local_dir={folder}",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=10",
            f"trainer.test_freq={steps // 8}",
            "trainer.save_freq=0",
            "trainer.logger=[]",
            *ALGORITHMS[algorithm],
            *keys,
        ]
        process = start(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, stderr = process.communicate()
        if process.returncode != 0 and NOTHING_LEFT not in stderr:
            sys.exit(f"{' '.join(command)}\nfailed:\n{stderr[-3000:]}")
        (folder / "ended").touch()
    return {step: round(value, 4) for step, value in read_run(folder).columns[ACCURACY]}


def summarise(curves: dict[str, Curve]) -> dict[str, object]:
    """Return the curves by seed, and means over seeds of the last and of all accuracies."""
    last = [list(curve.values())[-1] for curve in curves.values()]
    every = [statistics.fmean(curve.values()) for curve in curves.values()]
    return {
        "last_mean": round(statistics.fmean(last), 4),
        "last_min": round(min(last), 4),
        "last_max": round(max(last), 4),
        "mean_over_steps": round(statistics.fmean(every), 4),
        "curves": curves,
    }


def plot(results: dict[str, dict[str, dict[str, object]]], path: Path) -> None:
    """Draw the mean over seeds of every curve, one panel for each task.

    The steps are numbers, or texts as in a JSON file that was read back.
    """
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(
        1, len(results), figsize=(4.2 * len(results), 3.6), sharey=True, squeeze=False
    )
    panels = list(axes[0])
    for panel, (task, algorithms) in zip(panels, results.items(), strict=True):
        for algorithm, result in algorithms.items():
            curves = list(result["curves"].values())  # pyright: ignore
            steps = sorted(set.intersection(*(set(curve) for curve in curves)), key=int)
            means = [statistics.fmean(curve[step] for curve in curves) for step in steps]
            panel.plot([int(step) for step in steps], means, label=algorithm)
        panel.set_title(task)
        panel.set_xlabel("training step")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("accuracy on held-out problems")
    panels[-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


@children_end()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder for all runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument(
        "--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", nargs="+", type=int, default=[80, 40, 40], help="by task")
    parser.add_argument("--output", type=Path, help="write the JSON object here too")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG file")
    parser.add_argument("--hidden", type=int, help="numbers of a token, in place of 64")
    parser.add_argument("--layers", type=int, default=12, help="with --hidden")
    parser.add_argument("--warm-start", nargs="+", default=[], help="further keys of tandem sft")
    parser.add_argument("keys", nargs="*", help="further keys of tandem train")
    options = parser.parse_intermixed_args()
    results: dict[str, dict[str, dict[str, object]]] = {}
    for task, steps in zip(options.tasks, options.steps, strict=True):
        curves: dict[str, dict[str, Curve]] = {name: {} for name in options.algorithms}
        for seed in options.seeds:
            own = options.folder / f"{task}-{seed}"
            materials, model = warm_model(own, task, seed=seed, options=options)
            for name in options.algorithms:
                curves[name][str(seed)] = train(
                    own / name,
                    materials,
                    model=model,
                    algorithm=name,
                    seed=seed,
                    steps=steps,
                    keys=options.keys,
                )
                last = list(curves[name][str(seed)].values())
                print(f"{task:8} {seed} {name:6} {last[0]:.3f} -> {last[-1]:.3f}", flush=True)
        results[task] = {name: summarise(own) for name, own in curves.items()}
    result = {
        **describe(),
        "steps": options.steps,
        "samples_per_step": 256,
        "tasks": results,
    }
    print(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
