# SPDX-License-Identifier: Apache-2.0
"""Two hosts made of network namespaces, each given the same command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import psutil
import pytest

from tests.chaos.processes import dying
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    sft_arguments,
    train_arguments,
)

ROOT = Path(__file__).resolve().parents[2]
SUBNET = "10.213.77"
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces by node rank; the cable's ends have the same names."""

    names: tuple[str, str]

    def start(
        self, rank: int, command: Sequence[str], *, environment: Mapping[str, str] = NOTHING
    ) -> subprocess.Popen[str]:
        """The common command on one of them."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        inherited |= environment
        launched = {"MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29713", "NODE_RANK": str(rank)}
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[rank], sys.executable, "-m", *command],
            cwd=ROOT,
            env=inherited | launched,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[1], "link", "set", self.names[1], "down")

    def processes(self, rank: int) -> list[int]:
        """Of everything that runs on one of them."""
        done = ip("netns", "pids", self.names[rank])
        return [int(pid) for pid in done.split() if is_running(int(pid))]


def is_running(pid: int) -> bool:
    """Zombies are not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Connected by a cable."""
    names = (f"ta{os.getpid()}", f"tb{os.getpid()}")
    if shutil.which("ip") is None:
        pytest.skip("no ip command (iproute2) to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1],
           "netns", names[1])  # fmt: skip
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    for number, name in enumerate(names, start=1):
        ip("-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", name)
        ip("-n", name, "link", "set", name, "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield Hosts(names)
    for name in names:
        for pid in ip("netns", "pids", name).split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        ip("netns", "delete", name)


def train(material: Material, run: Path, *overrides: str) -> tuple[str, ...]:
    """A run over both nodes, as each of them is told to make it."""
    arguments = train_arguments(
        material,
        run,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        "data.val_files=[]",
        *overrides,
    )
    return ("tandem.cli.main", *arguments)


def test_two_nodes_train_together_start_again_together_and_end_alike(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    """The process of the second node dies in step 3; the first node starts the run again."""
    run = tmp_path / "run"
    keys = ("trainer.max_restarts=3", "trainer.save_freq=1")  # Ray may fail on a busy machine
    dies = dying("actor-train+generate", 1, "update", 3)
    member = hosts.start(1, train(material, run, *keys), environment=dies)
    head = hosts.start(0, train(material, run, *keys), environment=dies)
    _, stderr = head.communicate(timeout=4 * LIMIT_S)
    assert head.returncode == 0, stderr
    assert member.wait(timeout=PATIENCE_S) == 0
    restart = read_lines(run / "restarts.jsonl")[-1]
    assert restart["step"] == 3 and restart["continues_after"] == 2
    assert sorted(metrics_of(run)) == [1, 2, 3]
    places = json.loads((run / "placement.json").read_text())
    assert sorted(place["node"] for place in places) == [0, 1]
    assert not hosts.processes(0)
    assert not hosts.processes(1)


def test_torchrun_on_two_nodes_forms_the_cluster_itself(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = sft_arguments(material, run, "trainer.device=cpu")[1:]

    def start(rank: int) -> subprocess.Popen[str]:
        launch = ("--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}")
        meeting = (f"--master_addr={SUBNET}.1", "--master_port=29714")
        entry = ("-m", "tandem.trainer.fsdp_sft_trainer")
        return hosts.start(rank, ("torch.distributed.run", *launch, *meeting, *entry, *arguments))

    nodes = [start(0), start(1)]
    for node in nodes:
        _, stderr = node.communicate(timeout=240)
        assert node.returncode == 0, stderr
    assert sorted(metrics_of(run)) == [1, 2, 3, 4, 5, 6]
    places = json.loads((run / "placement.json").read_text())
    assert sorted(place["node"] for place in places) == [0, 1]


def test_losing_a_node_ends_the_training_with_its_name(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = train(material, run, "trainer.total_training_steps=1000", "trainer.total_epochs=1000")
    head, member = hosts.start(0, command), hosts.start(1, command)
    deadline = time.monotonic() + 120
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    hosts.cut()
    cut_s = time.monotonic()
    _, stderr = head.communicate(timeout=60)
    assert time.monotonic() - cut_s < 25
    assert head.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    assert re.match(r"error: step \d+: \S+ rank \d .*(node was lost|cannot be reached)", line)
    _, stderr = member.communicate(timeout=60)
    assert member.returncode == 1
    assert f"the first node ({SUBNET}.1:29713) vanished" in stderr
    deadline = time.monotonic() + 20
    while (hosts.processes(0) or hosts.processes(1)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not hosts.processes(0)
    assert not hosts.processes(1)
