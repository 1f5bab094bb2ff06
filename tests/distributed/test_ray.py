# SPDX-License-Identifier: Apache-2.0
"""The runtime on a real local Ray. Devices are made up, so that isolation is real as well."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
import torch

from tandem.api import WorkerGroup
from tandem.errors import UserError
from tandem.runtime.cluster import ClusterSettings, plan_cluster
from tandem.runtime.failure import WorkerFailure
from tandem.runtime.ray import RayRuntime
from tandem.runtime.token import own_token
from tests.distributed.ray_driver import DEVICES, build_probe, main
from tests.fakes.commands import Command, Conditions, start_server
from tests.fakes.patience import LIMIT_S, PATIENCE_S

SLICE = ("4", "5", "6")


@pytest.fixture(scope="module")
def runtime() -> Iterator[RayRuntime]:
    """Two trainers and a generator on three of a node's devices."""
    start_server()  # without what follows in its environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(SLICE))
        patch.delenv("RAY_ADDRESS", raising=False)
        settings = ClusterSettings(1, 3, ray_init={"num_gpus": 3})
        pools = {"train": [0, 0], "generate": [0]}
        plan = plan_cluster(settings, os.environ)
        with RayRuntime(plan, platform=DEVICES, pools=pools) as runtime:
            yield runtime


@pytest.fixture(scope="module")
def groups(runtime: RayRuntime) -> dict[str, WorkerGroup]:
    return dict(runtime.start_pools({"train": build_probe, "generate": build_probe}))


def test_every_worker_has_a_place_and_a_device_of_its_own(
    runtime: RayRuntime, groups: dict[str, WorkerGroup]
) -> None:
    train, generate = groups["train"], groups["generate"]
    calls = [train.submit(0, "where"), train.submit(1, "where"), generate.submit(0, "where")]
    found = train.gather(calls)
    assert [(w["pool"], w["rank"], w["size"]) for w in found] == [
        ("train", 0, 2),
        ("train", 1, 2),
        ("generate", 0, 1),
    ]
    assert sorted(w["physical_id"] for w in found) == list(SLICE)
    for where in found:
        assert where["environment"]["CUDA_VISIBLE_DEVICES"] == where["physical_id"]
        assert (where["device_index"], where["threads"] >= 1) == (0, True)
        assert where["folder"] == os.getcwd()
        assert where["node_address"] == runtime.address
    told = [*runtime.workers["train"], *runtime.workers["generate"]]
    assert [one.pid for one in told] == [where["pid"] for where in found]


def test_calls_of_a_worker_run_one_at_a_time_in_order(groups: dict[str, WorkerGroup]) -> None:
    train = groups["train"]
    calls = [train.submit(0, "note", number) for number in range(60)]
    assert train.gather(calls[::-1])[0] == list(range(60))


JOIN = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=30)), "node")
"""


@pytest.mark.usefixtures("groups")
def test_the_cluster_answers_only_who_knows_its_token(runtime: RayRuntime) -> None:
    assert runtime._node is not None and runtime._node.has_started
    address = ray.get_runtime_context().gcs_address
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    known = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": own_token(os.environ)}
    wrong = known | {"RAY_AUTH_TOKEN": "0" * len(known["RAY_AUTH_TOKEN"])}
    ended = [
        subprocess.run(
            [sys.executable, "-c", JOIN, address],
            env=others | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        for environment in (known, {}, wrong)
    ]
    assert [one.stdout for one in ended] == ["1 node\n", "", ""]
    assert [one.returncode for one in ended] == [0, 1, 1]
    for one in ended[1:]:
        assert "InvalidAuthToken" in one.stderr


def test_tensors_and_keywords_reach_the_worker(groups: dict[str, WorkerGroup]) -> None:
    train = groups["train"]
    x = torch.arange(300_000, dtype=torch.float32)
    (total,) = train.gather([train.submit(1, "add", x, right=x)])
    assert torch.equal(total, 2 * x)
    total += 1  # results can be written to


def test_first_returns_while_others_are_busy(groups: dict[str, WorkerGroup]) -> None:
    train, generate = groups["train"], groups["generate"]
    calls = [train.submit(0, "sleep", 5.0), generate.submit(0, "sleep", 0.05)]
    assert train.first(calls) == 1
    ended = train.gather(calls)
    assert ended[1] < ended[0]


def test_exceptions_carry_the_workers_traceback(groups: dict[str, WorkerGroup]) -> None:
    train = groups["train"]
    with pytest.raises(WorkerFailure, match="train rank 1 .* failed in fail: ValueError: a bad"):
        train.gather([train.submit(0, "sleep", 0), train.submit(1, "fail", "value")])
    with pytest.raises(WorkerFailure, match="ray_driver.py") as raised:
        train.gather([train.submit(0, "fail", "unpicklable")])
    assert raised.value.cause == "UnpicklableError: holds a lock"
    with pytest.raises(UserError, match="^some.key=1: must be 2. Set some.key=2.$"):
        train.gather([train.submit(0, "fail", "user")])


def test_warnings_of_workers_are_logged_once(
    groups: dict[str, WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    train = groups["train"]
    with caplog.at_level(logging.WARNING):
        train.gather([train.submit(rank, "warn") for rank in range(2)])
    (record,) = caplog.records
    assert record.name == "tandem.models"
    assert record.getMessage().startswith("something odd in layer 3 (train rank ")


class Facade:
    """As those of the engines: blocking methods over a group."""

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self.order: list[float] = []

    def work(self, seconds: float) -> float:
        self.order.append(seconds)
        return self.group.gather([self.group.submit(0, "sleep", seconds)])[0]


def test_facades_work_at_the_same_time_and_each_in_order(
    runtime: RayRuntime, groups: dict[str, WorkerGroup]
) -> None:
    one, other = Facade(groups["train"]), Facade(groups["generate"])

    async def program() -> tuple[list[float], float]:
        started = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            calls = [tasks.create_task(runtime.call(one.work, s)) for s in (4.0, 0.01, 0.02)]
            calls.append(tasks.create_task(runtime.call(other.work, 4.0)))
        return [call.result() for call in calls], time.monotonic() - started

    ended, seconds = asyncio.run(program())
    assert one.order == [4.0, 0.01, 0.02]
    assert ended[:3] == sorted(ended[:3])
    assert seconds < 7.5, "the facades took turns"


def test_workers_have_the_drivers_priority(groups: dict[str, WorkerGroup]) -> None:
    train = groups["train"]
    (where,) = train.gather([train.submit(0, "where")])
    assert psutil.Process(where["pid"]).nice() == psutil.Process().nice()


def test_ray_keeps_no_record_of_calls(groups: dict[str, WorkerGroup]) -> None:
    """Records of calls make the head grow by 39 KB a training step. By default they are sent
    every second."""
    import ray

    train = groups["train"]
    train.gather([train.submit(0, "note", 0) for _ in range(20)])
    time.sleep(1.5)
    assert ray.timeline() == []


def run_driver(folder: Path, function: str, **environment: str) -> Command:
    """A driver in a process of its own, quiet about everything but its reports."""
    variables = {"CUDA_VISIBLE_DEVICES": ",".join(SLICE), **environment}
    conditions = Conditions(environment=variables, own_session=True)
    return Command([function], folder=folder / function, conditions=conditions, program=main)


def wait_until_gone(pids: list[int], *, timeout_s: float) -> list[int]:
    """Those that are left after the time."""

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + timeout_s
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [pid for pid in pids if runs(pid)]


def test_one_signal_ends_the_wait_for_nodes(tmp_path: Path) -> None:
    driver = run_driver(tmp_path, "wait_for_a_node")
    said = tmp_path / "wait_for_a_node/stdout.txt"
    driver.wait_for(said, text="\n")
    pids = json.loads(said.read_text().splitlines()[0])["pids"]
    driver.signal(signal.SIGTERM)
    assert driver.wait(PATIENCE_S).code == 128 + signal.SIGTERM
    assert len(pids) > 2
    assert not wait_until_gone(pids, timeout_s=PATIENCE_S)


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_lost_process_of_ray_is_named_without_a_traceback(tmp_path: Path, name: str) -> None:
    ended = run_driver(tmp_path, "lose_a_process", TANDEM_TEST_KILLED=name).wait(4 * LIMIT_S)
    wanted = f"Ray ended on the driver's node: its {name} was killed by SIGKILL"
    assert (ended.code, json.loads(ended.stdout)) == (1, {"error": wanted}), ended.stderr
    assert "Traceback" not in ended.stderr and "Check failed" not in ended.stderr


def test_a_worker_that_is_terminated_dies_at_once(tmp_path: Path) -> None:
    ended = run_driver(tmp_path, "terminate_a_worker").wait(4 * LIMIT_S)
    said = json.loads(ended.stdout)["error"]
    assert ended.code == 1 and " died in hold_the_interpreter" in said, (said, ended.stderr)


def test_unreachable_address_missing_devices_and_missing_nodes_are_refused(tmp_path: Path) -> None:
    what = ("an_address", "devices", "a_node")
    drivers = [run_driver(tmp_path, f"be_refused_{one}") for one in what]
    said = []
    for driver in drivers:
        ended = driver.wait(4 * LIMIT_S)
        assert ended.code == 0, ended.stderr
        said.append(json.loads(ended.stdout))
    address, devices, nodes = said
    assert re.match(
        r"RAY_ADDRESS='127.0.0.1:\d+': no Ray cluster answers there. ", address["error"]
    )
    assert address["seconds"] < PATIENCE_S
    assert devices["error"] == (
        "trainer.n_gpus_per_node=2, trainer.nnodes=1: the nodes cannot hold the run. "
        f"Needed: node 0 2 GPU, 2 CPU. There: 127.0.0.1 1 GPU, {max(2, os.cpu_count() or 1)} CPU. "
        "Lower these, or use nodes with more; the number of CPUs is the one declared to Ray "
        "(ray_kwargs.ray_init.num_cpus, ray start --num-cpus)."
    )
    assert nodes["error"] == (
        "trainer.nnodes=2: only 1 of them are there after 1 s. Start the others (NODE_RANK 1), or "
        "raise trainer.ray_wait_register_center_timeout."
    )


@pytest.mark.parametrize(("ray_init", "is_wanted"), [({}, False), ({"log_to_driver": True}, True)])
def test_ray_starts_only_the_processes_that_are_needed(
    tmp_path: Path, ray_init: dict[str, bool], *, is_wanted: bool
) -> None:
    driver = run_driver(tmp_path, "start_a_head", TANDEM_TEST_RAY_INIT=json.dumps(ray_init))
    ended = driver.wait(4 * LIMIT_S)
    assert ended.code == 0, ended.stderr
    said = json.loads(ended.stdout)
    commands = said["commands"]
    assert said["modes"] == ["token", "token"]
    assert any("gcs_server" in command for command in commands)
    assert not any("autoscaler" in command for command in commands)
    assert not any("client.server" in command for command in commands)
    assert any("log_monitor.py" in command for command in commands) == is_wanted


@pytest.mark.deep
def test_a_process_uses_clusters_with_and_without_a_token_in_any_order(tmp_path: Path) -> None:
    order = "existing own existing"
    driver = run_driver(tmp_path, "use_clusters_in_turn", TANDEM_TEST_CLUSTERS=order)
    ended = driver.wait(3 * PATIENCE_S)
    assert ended.code == 0, ended.stderr
    assert json.loads(ended.stdout) == {"modes": ["disabled", "token", "disabled"], "left": []}
