# SPDX-License-Identifier: Apache-2.0
"""A driver that hangs is named instead of waited for."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tandem.errors import UserError
from tandem.platforms.record import CPU
from tandem.platforms.registry import platform_named
from tandem.runtime import probe_devices


def hang() -> str:
    """Wait like a driver whose device does not come back."""
    time.sleep(600)
    return ""


def test_a_package_that_is_not_installed_is_named_without_a_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_devices, "_TIMEOUT_S", 0.0)
    (own,) = probe_devices.find_devices([CPU, platform_named("musa")])
    assert (own.number, own.problem) == (0, "the package torch_musa is not installed")


def test_a_driver_that_does_not_answer_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_devices, "_TIMEOUT_S", 0.2)
    with pytest.raises(UserError, match=r"^platform musa: its driver did not list"):
        probe_devices.find_devices([CPU, replace(platform_named("musa"), extension="", probe=hang)])
