# SPDX-License-Identifier: Apache-2.0
"""Two hosts made of network namespaces, each given the same command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.chaos.processes import dying
from tests.fakes.hosts import SUBNET, Hosts, NoNamespaces, two_hosts
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.fakes.tiny_run import (
    Material,
    metrics_of,
    read_lines,
    sft_arguments,
    train_arguments,
)

ROOT = Path(__file__).resolve().parents[2]
NOTHING: Mapping[str, str] = MappingProxyType({})


def start(
    hosts: Hosts, rank: int, command: Sequence[str], *, environment: Mapping[str, str] = NOTHING
) -> subprocess.Popen[str]:
    """Start the common command on one of the hosts."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    inherited |= environment
    return subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[rank], sys.executable, "-m", *command],
        cwd=ROOT,
        env=inherited | hosts.launch_variables(rank),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Connected by a cable."""
    try:
        with two_hosts() as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


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
    member = start(hosts, 1, train(material, run, *keys), environment=dies)
    head = start(hosts, 0, train(material, run, *keys), environment=dies)
    _, stderr = head.communicate(timeout=4 * LIMIT_S)
    assert head.returncode == 0, stderr
    assert member.wait(timeout=PATIENCE_S) == 0
    restart = read_lines(run / "restarts.jsonl")[-1]
    assert restart["step"] == 3 and restart["continues_after"] == 2
    assert sorted(metrics_of(run)) == [1, 2, 3]
    places = json.loads((run / "placement.json").read_text())
    assert sorted(place["node"] for place in places) == [0, 1]
    assert all_gone(hosts)


def all_gone(hosts: Hosts) -> bool:
    """Wait for the end of all processes on both nodes; return whether none is left."""
    deadline = time.monotonic() + PATIENCE_S
    while hosts.processes(0) or hosts.processes(1):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.deep
def test_torchrun_on_two_nodes_forms_the_cluster_itself(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = sft_arguments(material, run, "trainer.device=cpu")[1:]

    def launch(rank: int) -> subprocess.Popen[str]:
        size = ("--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}")
        meeting = (f"--master_addr={SUBNET}.1", "--master_port=29714")
        entry = ("-m", "tandem.trainer.fsdp_sft_trainer")
        return start(hosts, rank, ("torch.distributed.run", *size, *meeting, *entry, *arguments))

    nodes = [launch(0), launch(1)]
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
    head, member = start(hosts, 0, command), start(hosts, 1, command)
    deadline = time.monotonic() + 4 * LIMIT_S
    while not (run / "metrics.jsonl").exists():
        assert time.monotonic() < deadline, "no step in time"
        time.sleep(0.1)
    hosts.cut()
    cut_s = time.monotonic()
    _, stderr = head.communicate(timeout=LIMIT_S)
    assert time.monotonic() - cut_s < PATIENCE_S
    assert head.returncode == 1
    (line,) = [line for line in stderr.splitlines() if line.startswith("error:")]
    by_ray = r"\S+ rank \d .*(node was lost|cannot be reached)"
    by_head = rf"node 1 \({SUBNET}\.2\) was lost: .* or the network to it is down"
    assert re.match(rf"error: step \d+: ({by_ray}|{by_head})", line), line
    _, stderr = member.communicate(timeout=LIMIT_S)
    assert member.returncode == 1
    assert f"the first node ({SUBNET}.1:29713) vanished" in stderr
    assert all_gone(hosts)
