# SPDX-License-Identifier: Apache-2.0
"""AdamW against torch's optimizer of that name, and what importing the engine costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from tandem.engines.adamw import AdamW

STEP = """
import sys, torch
from tandem.engines.adamw import AdamW
optimizer = AdamW(betas=(0.9, 0.999), weight_decay=0.01)
optimizer.step({"x": torch.ones(3)}, {"x": torch.ones(3)}, rate=0.1)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_steps_equal_torchs_bit_by_bit() -> None:
    shapes = {"matrix": (5, 7), "vector": (9,), "scalar": (), "nothing": (0, 7)}
    ours = {name: torch.ones(shape) for name, shape in shapes.items()}
    theirs = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = AdamW(betas=(0.8, 0.95), weight_decay=0.2)
    reference = torch.optim.AdamW(theirs.values(), betas=(0.8, 0.95), weight_decay=0.2, fused=True)
    for rate in (0.1, 0.03, 0.0, 0.2):
        reference.param_groups[0]["lr"] = rate
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        optimizer.step(ours, gradients, rate=rate)
        reference.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=0, atol=0)


def test_a_step_does_not_import_the_compiler() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", STEP], check=False, cwd=root, timeout=60)
    assert done.returncode == 0
