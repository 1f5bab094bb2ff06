# SPDX-License-Identifier: Apache-2.0
"""The arguments and results of a check of the suite, and the comparison of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tandem.testing.processes import Here

Measured = Mapping[str, float] | None
"""Measurements by name. Names end in ``_error`` (a relative difference from the host's result) or
``_gb_s``. None if there is nothing to check, such as collectives of one process.
"""

UNIT_ROUNDOFF = 2.0**-24
"""The largest relative error of one rounding to fp32."""

# A value that goes through n accumulations is off by at most c sqrt(n) u of its size, in whatever
# order a device adds, with a probability of 1 - 2 exp(-c^2 / 2) (Higham and Mary 2019, theorem
# 2.4). The log-probs of the suite's model go through the most: two layers of 940 terms each (norms
# 256, projections 576, attention 106), then 350 of the final norm, the head and the normalization.
# With n = 2230 and c = 3.5 the bound is 9.9e-6.
EXACT = 1e-5
"""The bound on an error in fp32, relative to the largest value."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The environment of a check, which runs in every process of a world, each on its own device.

    Attributes:
        folder: an initially empty folder, shared by all processes and all checks.
    """

    here: Here
    folder: Path

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.here.device

    @property
    def is_host(self) -> bool:
        """Whether the device is the host, with which other devices are compared."""
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one ability of a platform.

    Attributes:
        name: ``area/ability``.
        run: raises ContractError if the platform lacks the ability. Any error is a failure.
    """

    name: str
    run: Callable[[Bench], Measured]


class ContractError(Exception):
    """A violation of the contract by a platform."""


def require(condition: bool, message: object) -> None:
    """Raise ContractError with ``message`` unless ``condition``."""
    if not condition:
        raise ContractError(str(message))


def require_equal(found: Tensor, expected: Tensor, *, what: str) -> None:
    """Raise ContractError unless both have equal values; ``expected`` is on the host."""
    found = found.detach().cpu()
    require(torch.equal(found, expected), f"{what}: {found}, expected {expected}")


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; inf if not finite."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    require(found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}")
    if not found.numel():
        return 0.0
    error = float((found - expected).abs().max()) / max(1e-30, float(expected.abs().max()))
    return float("inf") if math.isnan(error) else error


def mean_error_of(found: Tensor, expected: Tensor) -> float:
    """Return the mean difference relative to the mean magnitude of ``expected``."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    error = float((found - expected).abs().mean() / expected.abs().mean())
    return float("inf") if math.isnan(error) else error


def bounded(name: str, error: float, *, limit: float = EXACT) -> dict[str, float]:
    """Return ``error`` as a measurement, after a check against its limit."""
    require(error <= limit, f"{name}: differs from the host by {error:.2e}, at most {limit:.0e}")
    return {f"{name}_error": error}
