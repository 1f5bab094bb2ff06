# SPDX-License-Identifier: Apache-2.0
"""Access to vLLM, which is imported when the first of its names is asked for."""

from __future__ import annotations

import gc
import json
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""The variable that chooses between vLLM's model runners; without it, vLLM chooses."""
ENVIRONMENT: Mapping[str, str] = {
    # The process also trains: its threads are not vLLM's to bind.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # At each update it would warn of layers without weights; the sink accounts for all names.
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""The variables that vLLM reads in the process of a worker, unless the user has set them."""


def of_vllm(module: str, name: str) -> Any:
    """Import and return an object of vLLM.

    Args:
        module: the name of its module in vLLM, e.g. ``v1.engine.llm_engine``; "" for vLLM itself.
    """
    return getattr(import_module(f"vllm.{module}" if module else "vllm"), name)


@cache
def import_engine() -> None:
    """Import vLLM's engine, and let the garbage collector skip what is imported.

    These are a million objects and no garbage. vLLM collects four times when it starts, each of
    which would take half a second.
    """
    collects = gc.isenabled()
    gc.collect()  # what is garbage now would stay
    gc.disable()
    try:
        of_vllm("v1.engine.llm_engine", "LLMEngine")
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def register_model(folder: Path) -> None:
    """Register the classes of the model in ``folder``, if it has a config.json.

    vLLM knows classes by their names. It asks another process what such a class can do, which
    imports vLLM again for that and takes ten seconds. It keeps the answers in a folder of the user,
    which is empty on a new machine. A class that is registered itself is asked in this process.
    """
    file = folder / "config.json"
    if not file.is_file():
        return
    registry = of_vllm("model_executor.models.registry", "ModelRegistry")
    for name in json.loads(file.read_text(encoding="utf-8")).get("architectures") or ():
        known = registry.models.get(name)
        if known is not None:
            registry.register_model(name, known.load_model_cls())


@contextmanager
def undisturbed_process() -> Iterator[None]:
    """Restore the number of threads and the random states that vLLM changes when it starts.

    Trainer and engine share the process.
    """
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads = set_num_threads  # on CPUs vLLM puts a function there that warns
        set_num_threads(num_threads)
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
