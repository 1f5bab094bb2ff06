# SPDX-License-Identifier: Apache-2.0
"""The fused operators, compiled where an accelerator is and interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from tandem.models.operators import Operators
from tests.fakes import interpreted_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Return the device of the kernels."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@pytest.fixture(scope="session")
def fused() -> Operators:
    """Return the operators under test. Without triton the test is skipped."""
    interpreted_triton.install()
    from tandem.models.kernels.operators import TRITON

    return TRITON
