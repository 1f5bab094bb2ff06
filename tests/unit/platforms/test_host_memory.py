# SPDX-License-Identifier: Apache-2.0
"""The memory of the host, and the limits that containers put on it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tandem.platforms import host_memory
from tandem.platforms.host_memory import host_memory_bytes


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of control groups. This process is in ``/outer/inner`` of both versions."""
    own = tmp_path / "own"
    own.write_text("4:cpu,memory:/outer/inner\n1:name=systemd:/\n0::/outer/inner\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_OWN", own)
    return tmp_path / "cgroup"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_limits_it_is_that_of_the_machine(cgroups: Path) -> None:
    assert host_memory_bytes() == psutil.virtual_memory().total
    _write(cgroups / "memory.max", "max\n")
    _write(cgroups / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert host_memory_bytes() == psutil.virtual_memory().total


@pytest.mark.parametrize(
    "file",
    [
        "outer/inner/memory.max",
        "outer/memory.max",
        "memory.max",
        "memory/outer/inner/memory.limit_in_bytes",
        "memory/memory.limit_in_bytes",
    ],
)
def test_the_lowest_limit_of_all_groups_counts(cgroups: Path, file: str) -> None:
    _write(cgroups / "outer/memory.max", "5000000\n")
    _write(cgroups / file, "4000000\n")
    assert host_memory_bytes() == 4_000_000


def test_limits_of_other_groups_do_not_count(cgroups: Path) -> None:
    _write(cgroups / "other/memory.max", "4000000\n")
    _write(cgroups.parent / "memory.max", "4000000\n")
    _write(cgroups / "cpu/outer/inner/memory.limit_in_bytes", "4000000\n")
    assert host_memory_bytes() == psutil.virtual_memory().total


def test_a_system_without_control_groups_has_no_limit(
    cgroups: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_OWN", cgroups / "missing")
    assert host_memory_bytes() == psutil.virtual_memory().total
