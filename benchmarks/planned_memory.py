# SPDX-License-Identifier: Apache-2.0
"""Measured peaks of memory beside the plan of the same settings.

    python benchmarks/planned_memory.py [RESULT.json ...]

The results are those of ``grpo_step.py``, by default all in ``results/``. Those of runs that set
their own memory keys are left out, as their commands do not have the keys, and those of other
engines than the native one. The plan is that of the pool that trains, whose peak a result has.
Nothing runs on a device.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from shapes import SHAPES

from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import place
from tandem.config.parse.overrides import load_config
from tandem.config.plan.memory import GIB, plan_memory
from tandem.config.schema.run import RunConfig

DEVICE_GIB = {"H100": 79.2, "H200": 139.8}
MEMORY_KEYS = ("ppo_max_token_len_per_gpu=", "enable_gradient_checkpointing=")
"""The keys that ``grpo_step.py`` gives unless the run sets its own."""


def planned_gib(result: dict[str, Any]) -> float | None:
    """Return the planned memory of a device that trains; None if the result does not say it."""
    command = result.get("started", "")
    if result.get("system") != "tandem" or "rollout.name=" in command:
        return None
    if not all(key in command for key in MEMORY_KEYS):
        return None
    keys = [word for word in command.split() if "=" in word]
    config = load_config(RunConfig, keys).config
    sizes = ModelSizes.of(SHAPES[result["model"]].hf_config("bfloat16"))
    assert sizes is not None
    available = next(gib for name, gib in DEVICE_GIB.items() if name in result["device"])
    plans = plan_memory(config, sizes, available_bytes=int(available * GIB))
    return plans[place(config).pool_of("actor-train").name].total / GIB


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("results", nargs="*", type=Path)
    folder = Path(__file__).parent / "results"
    shares = []
    for path in parser.parse_args().results or sorted(folder.glob("*grpo-step-*.json")):
        result = json.loads(path.read_text())
        planned = planned_gib(result)
        if planned is None:
            continue
        shares.append(result["peak_gib"] / planned - 1)
        print(
            f"{path.stem:60} {result.get('devices', 1)} {planned:6.1f} planned, "
            f"{result['peak_gib']:6.1f} measured, {shares[-1]:+.0%}"
        )
    if shares:
        print(f"{len(shares)} runs, {min(shares):+.0%} to {max(shares):+.0%}")


if __name__ == "__main__":
    main()
