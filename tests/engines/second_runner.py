# SPDX-License-Identifier: Apache-2.0
"""A plug-in for pytest under which vLLM has its second model runner on a CPU. Triton's interpreter
computes the runner's kernels: ``pytest -p tests.engines.second_runner``.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

from tandem.rollout.vllm.library import SECOND_RUNNER
from tests.fakes import interpreted_triton

os.environ |= {SECOND_RUNNER: "1", "TRITON_INTERPRET": "1"}  # before triton is imported
interpreted_triton.install()

from triton.backends import backends  # noqa: E402

backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
