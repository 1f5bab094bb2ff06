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
from tests.fakes.commands import Command, Conditions
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
    hosts: Hosts,
    rank: int,
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str] = NOTHING,
) -> Command:
    """Start the common command on one of the hosts, with a folder of its own for its output."""
    variables = {**environment, **hosts.launch_variables(rank)}
    conditions = Conditions(environment=variables, host=hosts.names[rank])
    return Command(arguments, folder=folder / f"node_{rank}", conditions=conditions)


def launch(hosts: Hosts, rank: int, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a module of another package on one of the hosts."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
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


def train(material: Material, run: Path, *overrides: str) -> list[str]:
    """A run over both nodes, as each of them is told to make it."""
    return train_arguments(
        material,
        run,
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        "data.val_files=[]",
        *overrides,
    )


def test_two_nodes_train_together_start_again_together_and_end_alike(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    """The process of the second node dies in step 3; the first node starts the run again."""
    run = tmp_path / "run"
    keys = ("trainer.max_restarts=3", "trainer.save_freq=1")  # Ray may fail on a busy machine
    dies = dying("actor-train+generate", 1, "update", 3)
    arguments = train(material, run, *keys)
    member = start(hosts, 1, arguments, folder=tmp_path, environment=dies)
    head = start(hosts, 0, arguments, folder=tmp_path, environment=dies)
    ended = head.wait(4 * LIMIT_S)
    assert ended.code == 0, ended.stderr
    assert member.wait(PATIENCE_S).code == 0
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

    def launch_on(rank: int) -> subprocess.Popen[str]:
        size = ("--nnodes=2", "--nproc_per_node=1", f"--node_rank={rank}")
        meeting = (f"--master_addr={SUBNET}.1", "--master_port=29714")
        entry = ("-m", "tandem.trainer.fsdp_sft_trainer")
        return launch(hosts, rank, ("torch.distributed.run", *size, *meeting, *entry, *arguments))

    nodes = [launch_on(0), launch_on(1)]
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
    head, member = (start(hosts, rank, command, folder=tmp_path) for rank in (0, 1))
    head.wait_for(run / "metrics.jsonl")
    hosts.cut()
    cut_s = time.monotonic()
    ended = head.wait(LIMIT_S)
    assert time.monotonic() - cut_s < PATIENCE_S
    assert ended.code == 1
    (line,) = ended.errors
    by_ray = r"\S+ rank \d .*(node was lost|cannot be reached)"
    by_head = rf"node 1 \({SUBNET}\.2\) was lost: .* or the network to it is down"
    assert re.match(rf"error: step \d+: ({by_ray}|{by_head})", line), line
    ended = member.wait(LIMIT_S)
    assert ended.code == 1
    assert f"the first node ({SUBNET}.1:29713) vanished" in ended.stderr
    assert all_gone(hosts)
