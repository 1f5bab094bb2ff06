# SPDX-License-Identifier: Apache-2.0
"""Imports what an engine of vLLM imports when it starts on CPUs, with the variables of an engine.

It is for processes that others are forked from. vLLM does not find ray, which it would import: ray
reads its settings from the environment when it is imported, and each process has its own.
"""

import os
import sys
from importlib import import_module

from tandem.platforms.environment import set_defaults
from tandem.rollout.vllm.library import ENVIRONMENT, SECOND_RUNNER, import_engine, of_vllm

set_defaults(ENVIRONMENT)
sys.modules["ray"] = None  # type: ignore[assignment]
if os.environ.get(SECOND_RUNNER) == "1":
    import_module("tests.engines.second_runner")
import_engine()
of_vllm("v1.worker.cpu_worker", "CPUWorker")
of_vllm("v1.worker.cpu_model_runner", "CPUModelRunner")
del sys.modules["ray"]
