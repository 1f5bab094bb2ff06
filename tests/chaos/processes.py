# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: which they are, where they are, what is done to them, and their end."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.commands import TIMEOUT_S, Command
from tests.fakes.patience import PATIENCE_S

MARK = "XDG_TANDEM_TEST_MARK"
"""A variable that all processes of a run inherit, those of rewards because of how it begins."""

MOST_SECONDS_TO_END = 150.0
"""A run ends within seconds of a death; the time limits of its waits are longer than this."""

_DYING = Path(__file__).resolve().parents[1] / "fakes/dying"


def dying(
    pool: str, rank: int, method: str, number: int, *, signal: str = "SIGKILL"
) -> dict[str, str]:
    """The environment of a run in which a worker sends itself a signal at a call of its method,
    counted from 1; with ``signal="RAISE"`` it raises instead."""
    return _path() | {"TANDEM_TEST_DIE": f"{pool}:{rank}:{method}:{number}:{signal}"}


def disturbing_steps(
    folder: Path, *disturbances: str, number: int, limit_s: float
) -> dict[str, str]:
    """The environment of a run in which processes with vLLM are disturbed at a step, counted from 1
    in each process, or at another point (``tests/fakes/dying``).

    Args:
        disturbances: what happens to the first process with vLLM, to the second, and so on.
        folder: an empty folder, which afterwards has a file for each that has happened.
        limit_s: the least limit of a step.
    """
    listed = ",".join(disturbances)
    return _path() | {"TANDEM_TEST_STEPS": f"{folder}:{number}:{listed}:{limit_s:g}"}


def _path() -> dict[str, str]:
    entries = (str(_DYING), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {"PYTHONPATH": os.pathsep.join(entries)}


def wait_for_place(command: Command, run: Path, pool: str, *, rank: int) -> dict[str, Any]:
    """What ``placement.json`` says of a worker of this command; an earlier one's is of no use."""
    file = run / "placement.json"
    file.unlink(missing_ok=True)
    command.wait_for(file, text="]\n")
    places = json.loads(file.read_text())
    (place,) = [p for p in places if "+".join(p["tasks"]) == pool and p["rank"] == rank]
    return place


def wait_for_end(pid: int) -> None:
    """Until a process that is not our child is no more, or only its parent has yet to see that."""
    wait_for_status(pid, psutil.STATUS_ZOMBIE)


def wait_for_status(pid: int, status: str) -> None:
    """Until a process is in this state, or is no more."""
    deadline = time.monotonic() + TIMEOUT_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != status:
            assert time.monotonic() < deadline, f"process {pid} is not {status}"
            time.sleep(0.02)


def processes_with(mark: str) -> list[psutil.Process]:
    """All that were started in an environment with ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def none_left(mark: str) -> bool:
    """Return whether all processes of a run end in time."""
    deadline = time.monotonic() + PATIENCE_S
    while processes_with(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
