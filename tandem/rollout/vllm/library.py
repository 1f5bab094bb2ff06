# SPDX-License-Identifier: Apache-2.0
"""Access to vLLM, which is imported when the first of its names is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def of_vllm(module: str, name: str) -> Any:
    """Return the object of a name in a module of vLLM.

    Args:
        module: the name of the module inside vLLM, e.g. ``v1.engine.llm_engine``; "" for the top.
    """
    return getattr(import_module(f"vllm.{module}" if module else "vllm"), name)
