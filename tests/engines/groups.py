# SPDX-License-Identifier: Apache-2.0
"""The processes of a process group, and their end."""

from __future__ import annotations

import time
from pathlib import Path


def processes_of_group(group: int) -> list[int]:
    """The living processes of a process group."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def ends(group: int) -> bool:
    """Whether all processes of a group end within ten seconds of a kill."""
    start = time.monotonic()
    while processes_of_group(group) and time.monotonic() - start < 10:
        time.sleep(0.05)
    return not processes_of_group(group)
