# SPDX-License-Identifier: Apache-2.0
"""FlagCX's plug-in for torch.distributed is detected without being imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch import distributed

from tandem.comm.flagcx_plugin import flagcx_world_backend, plugin_devices
from tandem.errors import UserError


def test_without_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_devices() == ()
    with pytest.raises(
        UserError, match=r"^backend=cpu:gloo,musa:flagcx: .* is not installed\. Install"
    ):
        flagcx_world_backend("musa")
    package = tmp_path / "flagcx"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('it was imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(UserError, match=r"has not loaded it\. Unset TORCH_DEVICE_BACKEND_AUTOLOAD"):
        flagcx_world_backend("musa")


def test_with_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(distributed.Backend.backend_capability, "flagcx", ["musa"])
    assert plugin_devices() == ("musa",)
    assert flagcx_world_backend("musa") == "cpu:gloo,musa:flagcx"
    with pytest.raises(UserError, match=r"serves musa, as it was built\. Build it for npu, or use"):
        flagcx_world_backend("npu")
