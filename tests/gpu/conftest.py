# SPDX-License-Identifier: Apache-2.0
"""Tests of this folder need a GPU, and say so where there is none.

``pytest tests/gpu --trial`` runs them on a CPU in tiny sizes, kernels interpreted: that tells
whether the tests themselves are sound, in a few minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.gpu.machine import Machine

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known only where this folder is named on the command line."""
    parser.addoption("--trial", action="store_true", help="run tests/gpu on a CPU, tiny")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark everything here, and skip it where it cannot run."""
    runs = torch.cuda.is_available() or config.getoption("--trial", default=False)
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        item.add_marker(pytest.mark.gpu)
        if not runs:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: torch.cuda finds none"))


@pytest.fixture(scope="session")
def machine() -> Machine:
    """The GPU, or for a trial the CPU."""
    from tandem.platforms.record import CPU, CUDA
    from tests.fakes import interpreted_triton
    from tests.gpu.machine import Machine

    if torch.cuda.is_available():
        return Machine(torch.device("cuda"), CUDA, trial=False)
    interpreted_triton.install()
    return Machine(torch.device("cpu"), CPU, trial=True)
