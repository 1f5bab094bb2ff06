# SPDX-License-Identifier: Apache-2.0
"""The short form of ``make chaos``: a minute of disturbances in the modes of one process."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.chaos import priority
from tests.chaos.disturbances import Disturbance, SmallDisk, draw_plan, may_mount
from tests.chaos.job import Chaos
from tests.chaos.materials import write_materials
from tests.chaos.modes import DUMPS, MODES, NUM_STEPS
from tests.chaos.priority import raise_session
from tests.chaos.trials import Trial, check_cause, compare, outcome_of
from tests.fakes.patience import LIMIT_S


@pytest.mark.deep
def test_a_minute_of_disturbances_loses_nothing(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        materials = write_materials(tmp_path / "materials", patch=patch.setattr)
    modes = ("synchronous", "asynchronous, g=4", "agents")
    report = Chaos(tmp_path, materials, seed=1).run(modes, seconds=45)
    assert report["disturbances"] > 0
    assert report["details"] == {}


def write_run(run: Path, *, prompts: list[str], weights: bytes = b"w") -> Path:
    """What a finished run leaves, with two samples of one step in every dump."""
    (run / DUMPS).mkdir(parents=True)
    (run / f"global_step_{NUM_STEPS}").mkdir()
    (run / f"global_step_{NUM_STEPS}" / "model.safetensors").write_bytes(weights)
    rows = "".join(f'{{"step": {step}}}\n' for step in range(1, NUM_STEPS + 1))
    (run / "metrics.jsonl").write_text(rows)
    for step in range(1, NUM_STEPS + 1):
        lines = [f'{{"input": "{prompt} {step}", "gts": "1"}}\n' for prompt in prompts]
        (run / DUMPS / f"{step}.jsonl").write_text("".join(lines))
    return run


def test_the_job_sees_prompts_rows_and_weights_that_differ(tmp_path: Path) -> None:
    whole = outcome_of(write_run(tmp_path / "whole", prompts=["a", "b"]))
    same, other = Trial("synchronous"), Trial("synchronous")
    compare(same, MODES["synchronous"], run=tmp_path / "whole", whole=whole)
    assert same.problems == {}
    run = write_run(tmp_path / "other", prompts=["a", "a"], weights=b"v")
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 6, "x": 1}\n{"step": 6, "x": 1}\n')
    compare(other, MODES["synchronous"], run=run, whole=whole)
    assert other.has_compared_weights
    expected = {"prompts_lost", "prompts_doubled", "rows_doubled", "weights_different"}
    assert other.problems.keys() == expected


def done(kind: str, action: str, code: int, cause: str = "", cause_s: float = 1.0) -> Disturbance:
    """Return what was done to a process 77 after a second."""
    return Disturbance(kind, action, 1.0, code, cause, cause_s if cause else None, pid=77)


@pytest.mark.parametrize(
    ("disturbance", "problem"),
    [
        (done("reward", "SIGKILL", 0), None),
        (done("driver", "SIGTERM", 143), None),
        (done("driver", "SIGTERM", 1), "unnamed"),
        (done("raylet", "SIGKILL", 1), "unnamed"),
        (done("raylet", "SIGKILL", 1, "error: the node was lost"), None),
        (done("raylet", "SIGKILL", 1, "error: the node was lost", 20.0), "late"),
        (done("trainer", "SIGKILL", 1, "error: rank 0 (pid 77) was lost"), None),
        (done("trainer", "SIGKILL", 1, "error: rank 1 (pid 78) was lost"), "unnamed"),
        (
            done("member", "SIGKILL", 1, "error: rank 0 (pid 78) failed: Connection closed"),
            "unnamed",
        ),
        (done("member", "SIGKILL", 1, "error: node 1 (10.0.0.2) was lost"), None),
        (done("trainer", "stop", 1, "error: rank 0 (pid 77) hangs", 25.0), None),
        (done("trainer", "stop", 1, "error: rank 0 (pid 77) hangs", 35.0), "late"),
        (done("raylet", "pause", 1, "error: the node was lost"), "failed"),
        (done("driver", "pause", 1), "failed"),
        (done("disk", "full disk", 2, "error: no space is left"), None),
        (done("disk", "full disk", 1, "error: something is wrong"), "unnamed"),
        (done("cable", "lost node", 1, "error: the node was lost", 15.0), None),
        (done("cable", "lost node", 1, "error: the node was lost", 25.0), "late"),
    ],
)
def test_the_job_sees_ends_that_nobody_named_in_time(
    disturbance: Disturbance, problem: str | None
) -> None:
    trial = Trial("two processes")
    check_cause(trial, disturbance)
    assert list(trial.problems) == ([] if problem is None else [problem])


def test_the_end_of_a_worker_that_is_replaced_may_not_end_the_run() -> None:
    named = done("rollout", "SIGKILL", 1, "error: generate rank 0 (pid 77) was lost")
    trial = Trial("synchronous, replaced")
    check_cause(trial, named)
    assert trial.problems == {}
    check_cause(trial, replace(named, is_replaceable=True))
    assert list(trial.problems) == ["failed"]
    went_on = Trial("synchronous, replaced")
    check_cause(went_on, replace(named, is_replaceable=True, code=0, cause=""))
    assert went_on.problems == {}


def test_the_same_seed_draws_the_same_disturbances_of_all_kinds() -> None:
    def draw_all() -> list[str]:
        draw = random.Random(3)
        plans = [draw_plan(MODES["two nodes"], draw, steps=6, has_disk=True) for _ in range(200)]
        return [f"{plan}" for plan in plans]

    drawn = draw_all()
    assert drawn == draw_all()
    for action in ("SIGKILL", "SIGTERM", "SIGINT", "pause", "stop", "full disk", "lost node"):
        assert any(f"action={action!r}" in plan for plan in drawn), action


def test_the_sessions_of_the_job_are_raised(tmp_path: Path) -> None:
    """In a process of its own, which leaves the priority of the tests as it is."""
    group = Path("/proc/self/autogroup")
    if not group.exists():
        pytest.skip("this Linux has no autogroups")
    program = (
        "import os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from tests.chaos.priority import raised_priority\n"
        "os.setsid()\n"
        "os.nice(2)\n"
        "with raised_priority(1) as nice:\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "    try:\n"
        "        for pid in (os.getpid(), child.pid):\n"
        "            while not Path(f'/proc/{pid}/autogroup').read_text().endswith(' nice 1\\n'):\n"
        "                time.sleep(0.1)\n"
        "        assert nice == os.nice(0)\n"
        "    finally:\n"
        "        child.kill()\n"
    )
    own = group.read_text()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)
    assert group.read_text() == own
    assert not raise_session(2**22 + 1, 1)  # a process that does not exist


def test_each_session_is_raised_once_though_linux_permits_only_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Leader:
        pid: int

        def children(self, *, recursive: bool) -> list[Leader]:
            return [Leader(2), Leader(3)] if recursive else []

    is_permitted, raised = True, list[int]()

    def begin_pass(_: float) -> bool:
        nonlocal is_permitted
        is_permitted = True
        return len(raised) == 3

    def raise_one(pid: int, _: int) -> bool:
        nonlocal is_permitted
        if is_permitted:
            raised.append(pid)
        was_permitted, is_permitted = is_permitted, False
        return was_permitted

    monkeypatch.setattr(priority.psutil, "Process", lambda: Leader(1))
    monkeypatch.setattr(priority.os, "getsid", lambda pid: pid)
    monkeypatch.setattr(priority, "raise_session", raise_one)
    over: Any = SimpleNamespace(wait=begin_pass)
    priority._raise_sessions(-5, over)
    assert sorted(raised) == [1, 2, 3]


def test_an_error_of_a_job_without_permission_is_not_linked_to_the_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    niceness = os.nice(0)

    def refuse(increment: int) -> int:
        if increment:
            raise PermissionError
        return niceness

    monkeypatch.setattr(priority.os, "nice", refuse)
    with pytest.raises(KeyError) as raised, priority.raised_priority(-5) as nice:
        assert nice == niceness
        raise KeyError
    assert raised.value.__context__ is None


def test_a_small_disk_can_be_filled_and_freed(tmp_path: Path) -> None:
    if not may_mount(tmp_path / "trial"):
        pytest.skip("may not mount a file system")
    disk = SmallDisk(tmp_path / "disk", size="64k")
    try:
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            (tmp_path / "disk/file").write_text("text")
        disk.free()
        (tmp_path / "disk/file").write_text("text")
    finally:
        disk.close()
    assert list((tmp_path / "disk").iterdir()) == []
