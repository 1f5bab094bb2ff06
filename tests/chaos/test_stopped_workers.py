# SPDX-License-Identifier: Apache-2.0
"""A worker that is stopped: the run ends, though its process is there, and says who, where and
when; the stopped process goes too.
"""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import psutil

from tests.chaos.processes import (
    MARK,
    MOST_SECONDS_TO_END,
    dying,
    none_left,
    wait_for_place,
    wait_for_status,
)
from tests.fakes.commands import Command, Conditions
from tests.fakes.tiny_run import Material, train_arguments

POOL = "actor-train+generate"
TIMEOUT_S = 60
"""Of collectives; a worker may give no sign of life for half of it."""


def test_a_stopped_worker_ends_the_run(material: Material, tmp_path: Path) -> None:
    """By SIGSTOP in the middle of a step, while its peer waits for it in a collective."""
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    arguments = train_arguments(
        material,
        run,
        "trainer.n_gpus_per_node=2",
        f"actor_rollout_ref.nccl_timeout={TIMEOUT_S}",
        "data.val_files=[]",
    )
    environment = dying(POOL, 1, "update", 2, signal="SIGSTOP") | {MARK: mark}
    conditions = Conditions(environment=environment)
    command = Command(arguments, folder=tmp_path / "output", conditions=conditions)
    place = wait_for_place(command, run, POOL, rank=1)
    wait_for_status(place["pid"], psutil.STATUS_STOPPED)
    stopped_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - stopped_s < TIMEOUT_S / 2 + MOST_SECONDS_TO_END
    assert ended.code == 1
    (line,) = ended.errors
    assert line.startswith(
        f"error: step 2: {POOL} rank 1 (host {place['host']}, pid {place['pid']}) hangs in update: "
        f"no sign of life for {TIMEOUT_S / 2:g} s"
    ), line
    assert none_left(mark)
