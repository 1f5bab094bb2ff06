# SPDX-License-Identifier: Apache-2.0
"""Two small fixed runs on the CPU, their recorded results, and how far results may lie from them.

On a processor that is known by its digest, results must be the recorded ones bit for bit. On any
other processor sums are added in another order, and results may differ by rounding:

- A dot product of n terms, rounded to the unit roundoff u = 2**-24, is the exact product of factors
  that are perturbed by n * u at most, and by about sqrt(n) * u if the signs of the errors vary. The
  tiny model adds up at most 64 products at a time, so that sqrt(n) * u = 8 * u.
- ``record`` therefore repeats each run with every initial weight perturbed by 8 * u, up or down at
  random, and records the largest change of each number: its condition. ``SAFETY`` times this change
  is the tolerance, beside ``NUM_ULPS`` units in the last place for numbers that did not change.
- Differences between the log-probs of rollout and trainer are rounding and nothing else. They have
  an absolute bound, n * u times the largest log-prob (about 6) instead.

The initial weights are random multiples of 2**-16, drawn as integers. Fractions that processors
draw differ in the last place.

After a change that is meant to change numbers, record them anew and say why they changed:
``python -m tests.golden.golden_runs``. On another processor whose results lie within the bounds,
``python -m tests.golden.golden_runs --add-processor`` adds its digests.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.commands import run_command
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    repeatable,
    sft_arguments,
    train_arguments,
    write_material,
)

RECORDED = Path(__file__).parent / "recorded.json"
PERTURBATION = 8 * 2.0**-24
NUM_PERTURBED_RUNS = 4
SAFETY = 8.0
NUM_ULPS = 4 * 2.0**-23
ROUNDING_METRICS = "training/rollout_"
ROUNDING_BOUND = 64 * 2.0**-24 * 6.0
LOG_PROB_STEP = 1e-4
"""Recorded log-probs have four decimals."""


def grpo(material: Material, run: Path) -> list[str]:
    """Two optimizer steps a step, every term of the loss, greedy and sampled generation."""
    actor = "actor_rollout_ref.actor"
    return train_arguments(
        material,
        run,
        f"{actor}.ppo_mini_batch_size=2",
        f"{actor}.use_kl_loss=True",
        f"{actor}.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.top_k=50",
        "trainer.test_freq=2",
    )


def sft(material: Material, run: Path) -> list[str]:
    """Six steps with validation."""
    return sft_arguments(material, run, "trainer.test_freq=3")


RECIPES = {"grpo": grpo, "sft": sft}


def conditions() -> str:
    """Return all that may move the last bits of a result without being a defect."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {capability}, {_processor_name()}"


def _processor_name() -> str:
    """Libraries choose their kernels by vendor, family and model, not by capability alone."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = ("model name", "cpu family", "model")
    found = [re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE) for name in names]
    return " / ".join(match.group(1) for match in found if match) or platform.processor()


def fingerprint(material: Material) -> str:
    """Return the digest of the weights and the tokenizer that the runs begin with."""
    names = ("model.safetensors", "tokenizer.json")
    content = b"".join((material.policy / name).read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest()


def write_golden_material(folder: Path, *, perturbation_seed: int | None = None) -> Material:
    """Write the material of the runs, the same on every processor.

    Args:
        perturbation_seed: perturbs every weight by ``PERTURBATION``, up or down at random.
    """
    material = write_material(folder)
    file = material.policy / "model.safetensors"
    weights = load_file(file)
    draws = np.random.default_rng(0)
    for name, value in sorted(weights.items()):
        if value.ndim > 1:
            numbers_drawn = draws.integers(-2047, 2048, value.shape)
            weights[name] = torch.from_numpy(numbers_drawn / 2**16).float()
    if perturbation_seed is not None:
        generator = torch.Generator().manual_seed(perturbation_seed)
        for name, value in weights.items():
            signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            weights[name] = (value.double() * (1 + PERTURBATION * signs)).float()
    save_file(weights, file, metadata={"format": "pt"})
    return material


def observe(recipe: str, material: Material, folder: Path) -> dict[str, Any]:
    """Return the metrics of all steps, and the recorded samples with tokens and log-probs."""
    ended = run_command(RECIPES[recipe](material, folder / "run"), folder=folder)
    assert ended.code == 0, ended.stderr
    rollouts = folder / "run/rollouts.jsonl"
    samples = read_lines(rollouts) if rollouts.exists() else []
    seen = {
        "metrics": {str(step): row for step, row in repeatable(metrics_of(folder / "run")).items()},
        "samples": [
            {key: sample[key] for key in ("step", "tokens", "log_probs", "score", "advantage")}
            for sample in samples
        ],
    }
    return json.loads(json.dumps(seen))


def digest(seen: dict[str, Any]) -> str:
    """Return a digest of every bit of what was observed."""
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def numbers(seen: dict[str, Any]) -> dict[str, float]:
    """Return every number of what was observed, but for tokens, by its place."""
    found = {
        f"step {step}: {name}": value
        for step, row in seen["metrics"].items()
        for name, value in row.items()
    }
    for index, sample in enumerate(seen["samples"]):
        found |= {f"sample {index}: {name}": sample[name] for name in ("score", "advantage")}
        places = enumerate(sample["log_probs"])
        found |= {f"sample {index}: log-prob {place}": value for place, value in places}
    return found


def tolerance(place: str, value: float, *, change: float) -> float:
    """Return how far a number may lie from its recorded ``value`` on an unknown processor.

    Args:
        change: its largest change in the perturbed runs.
    """
    if place.partition(": ")[2].startswith(ROUNDING_METRICS):
        return ROUNDING_BOUND
    rounded = LOG_PROB_STEP if "log-prob" in place else 0.0
    return SAFETY * change + NUM_ULPS * abs(value) + rounded


def deviations(seen: dict[str, Any], recorded: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each result that lies too far from the recorded one."""
    tokens, others = ([sample["tokens"] for sample in run["samples"]] for run in (seen, recorded))
    if tokens != others:
        yield f"tokens {tokens}, recorded {others}"
    found, expected = numbers(seen), numbers(recorded)
    if found.keys() != expected.keys():
        yield f"only one of both has {sorted(found.keys() ^ expected.keys())}"
    for place in found.keys() & expected.keys():
        change = recorded["changes"].get(place, 0.0)
        bound = tolerance(place, expected[place], change=change)
        if not abs(found[place] - expected[place]) <= bound:
            yield f"{place}: {found[place]}, recorded {expected[place]} within {bound:.1e}"


def record() -> None:
    """Write the results of the runs on this processor, and how far rounding moves them."""
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        material = write_golden_material(Path(name) / "material")
        for recipe in RECIPES:
            seen = observe(recipe, material, Path(name) / recipe)
            exact = {conditions(): digest(seen)}
            runs[recipe] = seen | {"changes": _changes(recipe, seen), "digests": exact}
        begin = {"material": fingerprint(material)}
    RECORDED.write_text(json.dumps(begin | runs, indent=1) + "\n")


def _changes(recipe: str, seen: dict[str, Any]) -> dict[str, float]:
    """Return the largest change of each number in the perturbed runs, where there is one."""
    changes: dict[str, float] = {}
    expected = numbers(seen)
    for seed in range(NUM_PERTURBED_RUNS):
        with tempfile.TemporaryDirectory() as name:
            material = write_golden_material(Path(name) / "material", perturbation_seed=seed)
            perturbed = observe(recipe, material, Path(name))
        tokens = [[sample["tokens"] for sample in run["samples"]] for run in (seen, perturbed)]
        assert tokens[0] == tokens[1], f"{recipe}: rounding changes tokens; choose another run"
        for place, value in numbers(perturbed).items():
            changes[place] = max(changes.get(place, 0.0), abs(value - expected[place]))
    return {place: change for place, change in changes.items() if change}


def add_processor() -> None:
    """Add the digests of this processor, whose results must lie within the bounds."""
    recorded = json.loads(RECORDED.read_text())
    with tempfile.TemporaryDirectory() as name:
        material = write_golden_material(Path(name) / "material")
        for recipe in RECIPES:
            seen = observe(recipe, material, Path(name) / recipe)
            left = list(deviations(seen, recorded[recipe]))
            assert not left, "\n".join(left)
            recorded[recipe]["digests"][conditions()] = digest(seen)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--add-processor"]:
        add_processor()
    else:
        record()
