# SPDX-License-Identifier: Apache-2.0
"""Captured steps own what they refer to."""

from __future__ import annotations

import torch

from tandem.platforms.capture import Replay
from tests.gpu.machine import Machine


def _captured(machine: Machine, source: torch.Tensor) -> Replay:
    """Copies ``source`` into a tensor that nobody else refers to."""
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return machine.platform.make_capturer()(copy)


def test_memory_that_a_graph_writes_is_not_given_to_others(machine: Machine) -> None:
    source = torch.ones(1 << 20, device=machine.device)
    replay = _captured(machine, source)
    others = [torch.zeros_like(source) for _ in range(8)]
    replay()
    assert all(float(other.sum()) == 0 for other in others)
