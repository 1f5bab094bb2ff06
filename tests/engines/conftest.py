# SPDX-License-Identifier: Apache-2.0
"""Processes of these tests are forked from one that has imported vLLM, which takes seven seconds of
processor time. Those of commands with conditions import it themselves.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

from tests.fakes.preloading import PRELOADED

if find_spec("vllm") is not None:
    os.environ[PRELOADED] = "tests.engines.imported_vllm"
