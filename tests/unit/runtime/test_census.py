# SPDX-License-Identifier: Apache-2.0
"""A driver that hangs is named instead of waited for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tandem.errors import UserError
from tandem.platforms.record import CPU
from tandem.platforms.registry import platform_named
from tandem.runtime import census


def hang() -> str:
    """As a driver that waits for a device which does not come back."""
    time.sleep(600)
    return ""


def test_a_driver_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_LIMIT_S", 0.2)
    with pytest.raises(UserError, match=r"^platform musa: its driver does not say"):
        census.own_devices([CPU, replace(platform_named("musa"), probe=hang)])
