# SPDX-License-Identifier: Apache-2.0
"""A GRPO run that generates with an attached server is the run of the native engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.commands import run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments
from tests.fakes.vllm_server import VllmServerDouble

_ROLLOUT = "actor_rollout_ref.rollout"


def _train(
    material: Material, folder: Path, policy: Path, *keys: str
) -> tuple[dict[int, dict[str, float]], str]:
    """Return the metrics of two steps, and what the run said."""
    arguments = (
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        f"{_ROLLOUT}.max_num_seqs=8",
        *keys,
    )
    ended = run_command(train_arguments(material, folder / "run", *arguments), folder=folder)
    assert ended.code == 0, ended.stderr
    return metrics_of(folder / "run"), ended.stderr


def _double(policy: Path) -> VllmServerDouble:
    server = VllmServerDouble(policy)
    server.info["model_config"]["max_model_len"] = 4096
    return server


def test_each_process_of_a_run_has_servers_of_its_own(material: Material, tmp_path: Path) -> None:
    policy = write_tiny_policy(tmp_path / "policy", size=replace(TINY, hidden=64))
    expected, _ = _train(material, tmp_path / "native", policy, f"{_ROLLOUT}.name=native")
    servers = [_double(policy) for _ in range(3)]
    urls = ",".join(server.url for server in servers)
    try:
        found, _ = _train(
            material,
            tmp_path / "servers",
            policy,
            "trainer.n_gpus_per_node=2",
            f"{_ROLLOUT}.name=vllm",
            f"{_ROLLOUT}.engine_kwargs.vllm.urls=[{urls}]",
        )
    finally:
        for server in servers:
            server.kill()
    assert all(server.num_tokens > 0 for server in servers)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)


def test_a_run_with_a_server_is_that_of_the_native_engine(
    material: Material, tmp_path: Path
) -> None:
    policy = write_tiny_policy(tmp_path / "policy", size=replace(TINY, hidden=64))
    expected, _ = _train(material, tmp_path / "native", policy, f"{_ROLLOUT}.name=native")
    server = _double(policy)
    try:
        keys = (f"{_ROLLOUT}.name=vllm", f"{_ROLLOUT}.engine_kwargs.vllm.urls={server.url}")
        found, said = _train(
            material, tmp_path / "server", policy, *keys, f"{_ROLLOUT}.enforce_eager=True"
        )
    finally:
        server.kill()
    assert server.num_tokens > 0
    assert "enforce_eager" in said, "the key is the server's"
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
