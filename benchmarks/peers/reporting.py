# SPDX-License-Identifier: Apache-2.0
"""The report of a training step, for the scripts of this folder. Needs torch only."""

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch


def describe(packages: Sequence[str]) -> dict[str, Any]:
    """Return date, device, versions of ``packages`` and command.

    Call it when the work is done: the device's context takes memory.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():  # the first on the path is in use
        found.setdefault(distribution.metadata["Name"].lower(), distribution.version)
    return {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {name: found[name] for name in packages if name in found},
        "command": "python " + " ".join(sys.argv),
    }


def tell_step(report: Mapping[str, Any], output: Path | None) -> None:
    """Print a report of steps as JSON, keep it in a file, and print it in a line."""
    text = json.dumps(report, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")
    shown = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report["phases_s"].items())
    print(
        f"{report['model']} {report['workload']}: step {report['step_s']:.2f} s ({shown}), "
        f"{report['tokens_per_s']:,.0f} tokens/s, {report['peak_gib']:.1f} GiB, "
        f"first step after {report['first_step_s']:.1f} s"
    )
