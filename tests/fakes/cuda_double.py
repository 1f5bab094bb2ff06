# SPDX-License-Identifier: Apache-2.0
"""Names of ``torch.cuda`` that megatron-core uses, answered by the CPU in one process."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_CPU = torch.device("cpu")


def install() -> None:
    """Answer for the rest of the life of this process."""
    answers: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "device_count": lambda: 1,
        "synchronize": lambda device=None: None,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "_lazy_call": lambda call, **settings: call(),
        "default_generators": {_CPU: torch.default_generator, 0: torch.default_generator},
        "is_current_stream_capturing": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, answer)
    torch.Tensor.cuda = lambda tensor, *args, **settings: tensor
