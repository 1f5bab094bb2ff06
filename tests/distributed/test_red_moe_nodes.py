# SPDX-License-Identifier: Apache-2.0
"""MO20: dots.rl's command for red-moe on two nodes of eight devices, which are processes here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fakes.commands import run_command
from tests.fakes.hosts import Hosts, NoNamespaces, two_hosts
from tests.fakes.published_commands import RED_MOE_COMMAND, words_of
from tests.fakes.tiny_experts import write_tiny_red_moe
from tests.fakes.tiny_run import Material, metrics_of

LIMIT_S = 2400.0
"""Sixteen processes start and train on whatever processors there are."""
_POLL_S = 0.5
TINY = {"data.train_batch_size": "4", "actor_rollout_ref.actor.ppo_mini_batch_size": "4"}
"""The sizes that follow from the number of prompts in the material."""
BESIDES = (
    "trainer.device=cpu",
    "trainer.total_training_steps=1",
    "trainer.save_freq=1",
    "trainer.max_restarts=3",  # Ray may fail to start on a busy machine
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Connected by a cable."""
    try:
        with two_hosts() as made:
            yield made
    except NoNamespaces as error:
        pytest.skip(str(error))


def _start(hosts: Hosts, rank: int, words: Sequence[str], *, folder: Path) -> subprocess.Popen[str]:
    """Start the command on one of the nodes: the published one, but for the module."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    entry = [sys.executable, "-m", "tandem.trainer.main_ppo", *words]
    with (folder / f"output_{rank}.txt").open("w") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", hosts.names[rank], *entry],
            cwd=folder,
            env=inherited | hosts.launch_variables(rank),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )


def _wait_for(nodes: Sequence[subprocess.Popen[str]], *, folder: Path) -> None:
    """Wait until both have ended. The output of the first that fails is shown at once."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        codes = [node.poll() for node in nodes]
        for rank, code in enumerate(codes):
            output = folder / f"output_{rank}.txt"
            is_late = code is None and time.monotonic() > deadline
            assert code in (None, 0) and not is_late, (code, output.read_text()[-4000:])
        if None not in codes:
            return
        time.sleep(_POLL_S)


def _made_tiny(word: str) -> str:
    name = word.partition("=")[0]
    return f"{name}={TINY[name]}" if name in TINY else word


@pytest.mark.deep
def test_mo20_red_moe_trains_on_two_nodes_with_experts_over_eight_processes(
    hosts: Hosts, material: Material, tmp_path: Path
) -> None:
    policy = tmp_path / "red-moe"
    policy.mkdir()
    write_tiny_red_moe(policy)
    variables = {
        "ROOT_PATH": str(tmp_path),
        "TRAIN_DATA_PATH": str(material.train),
        "TEST_DATA_PATH": str(material.test),
        "MODEL_PATH": str(policy),
        "EXP_NAME": "run_1",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "max_prompt_length": "96",
        "max_response_length": "12",
    }
    published = words_of(RED_MOE_COMMAND, tmp_path, **variables)
    words = [*map(_made_tiny, published), *BESIDES]
    nodes = [_start(hosts, rank, words, folder=tmp_path) for rank in (0, 1)]
    try:
        _wait_for(nodes, folder=tmp_path)
    finally:
        for node in nodes:
            node.kill()
    run = tmp_path / "checkpoints/verl_async_rl_redmoe16b/run_1"
    rows = metrics_of(run)
    # No answer of a random model is right: rewards are equal, and there is no gradient.
    assert rows[1]["actor/experts/max_over_mean"] >= 1
    assert any(name.startswith("val-core/") for row in rows.values() for name in row)
    tasks = [tuple(place["tasks"]) for place in json.loads((run / "placement.json").read_text())]
    assert [tasks.count((name,)) for name in ("actor-train", "ref_logp", "generate")] == [8, 4, 4]
    roles = json.loads((run / "config.json").read_text())["actor_rollout_ref"]
    sizes = [roles[role]["fsdp_config"]["expert_model_parallel_size"] for role in ("actor", "ref")]
    assert sizes == [8, 1]
    exported = tmp_path / "exported"
    ended = run_command(["export", str(run), "--output", str(exported)], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert load_file(exported / "model.safetensors").keys() == (
        load_file(policy / "model.safetensors").keys()
    )
