# SPDX-License-Identifier: Apache-2.0
"""Two small fixed runs on the CPU, and what of them is compared bit for bit.

After a change that is meant to move numbers, record them anew and say why they moved:
``python -m tests.golden.golden_runs``.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

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


def conditions() -> dict[str, str]:
    """What may move the last bits of a result without anybody's fault."""
    return {
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "model": _processor_name(),
    }


def _processor_name() -> str:
    """Libraries choose their kernels by vendor and model, not by capability alone."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def fingerprint(material: Material) -> str:
    """Of the weights and the tokenizer that the runs begin with."""
    names = ("model.safetensors", "tokenizer.json")
    content = b"".join((material.policy / name).read_bytes() for name in names)
    return hashlib.sha256(content).hexdigest()


def observe(recipe: str, material: Material, folder: Path) -> dict[str, Any]:
    """Metrics of all steps, and the recorded samples with their tokens and log-probs."""
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


def record() -> None:
    """Write what the runs give here and now."""
    with tempfile.TemporaryDirectory() as name:
        material = write_material(Path(name) / "material")
        runs = {recipe: observe(recipe, material, Path(name) / recipe) for recipe in RECIPES}
        begin = {"conditions": conditions(), "material": fingerprint(material)}
    RECORDED.write_text(json.dumps(begin | runs, indent=1) + "\n")


if __name__ == "__main__":
    record()
