# SPDX-License-Identifier: Apache-2.0
"""A plug-in for pytest under which vLLM has its second model runner on a CPU. Triton's interpreter
computes the runner's kernels: ``pytest -p tests.engines.second_runner``.

Log-probs come as late as a device may send them: when vLLM reads the tokens of their step.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tandem.rollout.vllm.draw import DrawnLogProbs, Stream
from tandem.rollout.vllm.library import SECOND_RUNNER
from tests.fakes import interpreted_triton

os.environ |= {SECOND_RUNNER: "1", "TRITON_INTERPRET": "1"}  # before triton is imported
interpreted_triton.install()

from triton.backends import backends  # noqa: E402

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402


@dataclass
class _Steps:
    """The steps of the engine that drew last: how many were drawn, and how many vLLM has read."""

    owner: DrawnLogProbs | None = None
    num_drawn: int = 0
    num_read: int = 0


@dataclass
class _Event:
    """Happens when vLLM has read the step with this number."""

    step: int

    def query(self) -> bool:
        return _STEPS.num_read >= self.step


_STEPS = _Steps()
_update_from_output = Scheduler.update_from_output


def _note(
    self: DrawnLogProbs, rows: Sequence[Stream], positions: Sequence[int], *, logp_B: Tensor
) -> None:
    if self is not _STEPS.owner:
        _STEPS.owner, _STEPS.num_drawn, _STEPS.num_read = self, 0, 0
    self.read()
    _STEPS.num_drawn += 1
    event: Any = _Event(_STEPS.num_drawn)
    self._steps.append((rows, positions, logp_B.clone(), event))


def _read_step(self: Any, scheduled: Any, output: Any) -> Any:
    if scheduled.total_num_scheduled_tokens:
        _STEPS.num_read += 1
    return _update_from_output(self, scheduled, output)


DrawnLogProbs.note = _note
Scheduler.update_from_output = _read_step
