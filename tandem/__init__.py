# SPDX-License-Identifier: Apache-2.0
"""tandem: reinforcement-learning post-training of language models, generation and training in
tandem.

``train``, ``sft`` and ``load_run`` are the Python API (docs/python.md). It is loaded when one of
its names is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tandem.errors import RunFailure, UserError

if TYPE_CHECKING:
    from tandem.facade.callback import StepMetrics, StopTraining
    from tandem.facade.run import Run, load_run
    from tandem.facade.start import Interrupted, sft, train

__version__ = "0.1.0"

__all__ = [
    "Interrupted",
    "Run",
    "RunFailure",
    "StepMetrics",
    "StopTraining",
    "UserError",
    "load_run",
    "sft",
    "train",
]

_PLACES = {
    "Interrupted": "tandem.facade.start",
    "Run": "tandem.facade.run",
    "StepMetrics": "tandem.facade.callback",
    "StopTraining": "tandem.facade.callback",
    "load_run": "tandem.facade.run",
    "sft": "tandem.facade.start",
    "train": "tandem.facade.start",
}


def __getattr__(name: str) -> Any:
    """Load the module of a name of the Python API."""
    if name not in _PLACES:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
