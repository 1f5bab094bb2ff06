# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the table of docs/layout.md as one literal.

A room is a folder or a root file of the package. ``errors`` is open to every room (docs/adr/0001).
"""

from __future__ import annotations

ROOMS = (
    "pictures",
    "types",
    "errors",
    "api",
    "config",
    "platforms",
    "comm",
    "metrics",
    "data",
    "children",
    "agents",
    "rewards",
    "algorithms",
    "models",
    "engines",
    "weight_sync",
    "rollout",
    "checkpoint",
    "pipeline",
    "report",
    "planner",
    "runtime",
    "workers",
    "testing",
    "driver",
    "facade",
    "quickstart",
    "cli",
    "trainer",
    "__main__",
)

EVERYTHING = frozenset(ROOMS) - {"__main__"}
"""What may be imported at all."""

OPEN_TO_ALL = frozenset({"errors"})

ALLOWED: dict[str, frozenset[str]] = {
    "pictures": frozenset(),
    "types": frozenset({"pictures"}),
    "errors": frozenset(),
    "api": frozenset({"types"}),
    "config": frozenset(),
    "platforms": frozenset({"api"}),
    "comm": frozenset({"api", "platforms"}),
    "metrics": frozenset({"types", "api", "config"}),
    "data": frozenset({"pictures", "types", "config"}),
    "children": frozenset({"types"}),
    "agents": frozenset({"types", "api", "config", "data", "children"}),
    "rewards": frozenset({"types", "config", "children"}),
    "algorithms": frozenset({"types", "config"}),
    "models": frozenset({"pictures", "types", "config", "platforms"}),
    "engines": frozenset({"types", "api", "config", "platforms", "comm", "models"}),
    "weight_sync": frozenset({"types", "api", "config", "platforms", "comm"}),
    "rollout": frozenset(
        {"pictures", "types", "api", "config", "children"}
        | {"platforms", "comm", "models", "weight_sync"}
    ),
    "checkpoint": frozenset({"types", "api", "config"}),
    "pipeline": frozenset(
        {"types", "api", "config", "data", "agents", "rewards"}
        | {"algorithms", "metrics", "checkpoint"}
    ),
    "report": frozenset({"types", "config", "metrics"}),
    "planner": frozenset(
        {"types", "api", "config", "data", "metrics", "checkpoint", "pipeline", "report"}
    ),
    "runtime": frozenset({"types", "api", "config", "platforms"}),
    "workers": EVERYTHING
    - {"pipeline", "report", "planner", "runtime", "workers", "testing"}
    - {"driver", "facade", "quickstart", "cli", "trainer"},
    "testing": EVERYTHING - {"testing", "driver", "facade", "quickstart", "cli", "trainer"},
    "driver": EVERYTHING
    - {"planner", "testing", "driver", "facade", "quickstart", "cli", "trainer"},
    "facade": EVERYTHING - {"testing", "facade", "quickstart", "cli", "trainer"},
    "quickstart": EVERYTHING - {"planner", "testing", "facade", "quickstart", "cli", "trainer"},
    "cli": EVERYTHING - {"cli"},
    "trainer": EVERYTHING - {"trainer"},
    "__main__": frozenset({"cli"}),
}

OWNERS: dict[str, frozenset[str]] = {
    "ray": frozenset({"runtime"}),
    "vllm": frozenset({"rollout"}),
    "sglang": frozenset({"rollout"}),
    "megatron": frozenset({"engines"}),
    "wandb": frozenset({"metrics"}),
    "mlflow": frozenset({"metrics"}),
    "swanlab": frozenset({"metrics"}),
    "tensorboard": frozenset({"metrics", "report"}),
    "torch_npu": frozenset({"platforms", "comm"}),
    "torch_musa": frozenset({"platforms", "comm"}),
    "flagcx": frozenset({"platforms", "comm"}),
}
"""Third-party packages that only some rooms may import. These rooms may import them lazily."""

OPTIONAL_PACKAGES = frozenset(
    {
        "datasets",
        "math_verify",
        "matplotlib",
        "megatron",
        "mlflow",
        "peft",
        "pyarrow",
        "pytest",
        "ray",
        "sglang",
        "swanlab",
        "tensorboard",
        "triton",
        "vllm",
        "wandb",
    }
)
"""Packages that a host may lack: their one adapter file may import them inside a function."""
