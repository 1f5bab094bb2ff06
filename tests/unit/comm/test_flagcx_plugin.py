# SPDX-License-Identifier: Apache-2.0
"""FlagCX's plug-in for torch.distributed is detected without being imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import distributed

from tandem.comm.flagcx_plugin import plugin_devices, pool_library
from tandem.errors import UserError
from tandem.platforms.record import CPU
from tandem.platforms.registry import platform_named

MUSA, NPU = platform_named("musa"), platform_named("npu")


def test_without_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_devices() == ()
    with pytest.raises(
        UserError, match=r"^USE_FLAGCX=1: .* is not installed\. Install.* for mccl,"
    ):
        pool_library(MUSA, wants_flagcx=True)
    package = tmp_path / "flagcx"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UserError, match=r"has not loaded it\. Unset TORCH_DEVICE_BACKEND_AUTOLOAD"):
        pool_library(MUSA, wants_flagcx=True)


def test_with_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(distributed.Backend.backend_capability, "flagcx", ["musa"])
    assert plugin_devices() == ("musa",)
    assert pool_library(MUSA, wants_flagcx=True) == "flagcx"
    assert pool_library(MUSA, wants_flagcx=False) == "mccl"
    assert pool_library(CPU, wants_flagcx=True) == "gloo"
    with pytest.raises(UserError, match=r"was built for musa\. Build it for npu, or"):
        pool_library(NPU, wants_flagcx=True)
