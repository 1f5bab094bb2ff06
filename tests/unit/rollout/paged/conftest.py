# SPDX-License-Identifier: Apache-2.0
"""The kernels of the paged engine, compiled where an accelerator is and interpreted elsewhere."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import interpreted_triton


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run; without triton the test is skipped."""
    interpreted_triton.install()
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
