# SPDX-License-Identifier: Apache-2.0
"""The memory of the host that the processes of a run may use."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def host_memory_bytes() -> int:
    """Return the host's memory, used or not, or the limit of the container if that is less."""
    return min([psutil.virtual_memory().total, *_limits(_CGROUPS, _OWN)])


def _limits(cgroups: Path, own: Path) -> list[int]:
    """Return the limits of the groups of this process and of those around them, of cgroups of both
    versions. What cannot be read limits nothing.
    """
    limits: list[int] = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container, the path may be that of the host, of which only the end is there.
        group = root / path.lstrip("/")
        for folder in (group, *group.parents):
            limit = _read(folder / name).strip()
            limits += [int(limit)] if limit.isdigit() else []
            if folder == root:
                break
    return limits


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
