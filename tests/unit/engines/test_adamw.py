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
parameter = torch.nn.Parameter(torch.ones(3))
parameter.grad = torch.ones(3)
AdamW([parameter], betas=(0.9, 0.999), weight_decay=0.01).step(0.1)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_steps_equal_torchs_bit_by_bit() -> None:
    shapes = ((5, 7), (9,), ())
    ours, theirs = ([nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2))
    optimizer = AdamW(ours, betas=(0.8, 0.95), weight_decay=0.2)
    reference = torch.optim.AdamW(theirs, betas=(0.8, 0.95), weight_decay=0.2, fused=True)
    for rate in (0.1, 0.03, 0.0, 0.2):
        reference.param_groups[0]["lr"] = rate
        for our, their in zip(ours, theirs, strict=True):
            our.grad = torch.randn(our.shape)
            their.grad = our.grad.clone()
        optimizer.step(rate)
        reference.step()
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=0)


def test_a_step_does_not_import_the_compiler() -> None:
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", STEP], check=False, cwd=root, timeout=60)
    assert done.returncode == 0
