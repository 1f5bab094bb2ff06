# SPDX-License-Identifier: Apache-2.0
"""Runs that train models with experts, from command to files."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.fakes.commands import run_command
from tests.fakes.tiny_experts import write_tiny_moonlight, write_tiny_qwen3_moe
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

R2 = ("actor_rollout_ref.actor.megatron.router_replay.mode=R2",)
R3 = (
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny Qwen3-MoE. Do not write into it."""
    return write_tiny_qwen3_moe(tmp_path_factory.mktemp("experts") / "policy")


@pytest.fixture(scope="module")
def latent_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model with latent attention. Do not write into it."""
    return write_tiny_moonlight(tmp_path_factory.mktemp("latent") / "policy")


@pytest.mark.parametrize(
    ("family", "keys"),
    [("policy", R3), ("policy", R2), ("latent_policy", R3)],
    ids=["R3", "R2", "latent-R3"],
)
def test_grpo_trains_experts_on_the_policy_of_its_rollouts(
    family: str,
    keys: tuple[str, ...],
    material: Material,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    policy, run = request.getfixturevalue(family), tmp_path / "run"
    words = train_arguments(
        material,
        run,
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        *keys,
    )
    ended = run_command(words, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    for row in list(metrics_of(run).values())[1:]:
        # The log-probs of rollout and trainer are those of the same experts, step after step.
        assert row["training/rollout_probs_diff_max"] < 1e-5
        assert row["actor/grad_norm"] > 0
        assert 1 <= row["actor/experts/max_over_mean"] <= 4
        # The second mini-batch meets a router that has moved. By chance a quarter would agree.
        assert 0.4 < row["actor/router/replay_overlap"] <= 1
        # The other family has one layer with experts, and chooses in one of two groups.
        assert row["actor/router/replay_overlap"] < 1 or family == "latent_policy"
    before = load_file(policy / "model.safetensors")
    after = load_file(run / "global_step_4/actor/model.safetensors")
    assert after.keys() == before.keys()
    changed = [name for name in before if not after[name].equal(before[name])]
    assert any(".experts." in name for name in changed) and any("mlp.gate" in x for x in changed)


def test_mo7_r3_with_the_engine_of_accelerators_trains_as_with_the_dense_one(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """Its kernels are interpreted. Two optimizer steps on a batch: the second router has moved."""
    pytest.importorskip("triton", reason="the kernels need triton")
    found = []
    for number, name in enumerate(("native", "tests.fakes.paged_on_cpu:build")):
        run = tmp_path / str(number)
        words = train_arguments(
            material,
            run,
            f"actor_rollout_ref.model.path={policy}",
            f"actor_rollout_ref.rollout.name={name}",
            "data.train_batch_size=2",
            "data.max_response_length=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.rollout.seed=7",  # no draw is within rounding of two tokens
            "trainer.total_training_steps=1",
            "trainer.val_before_train=False",
            "trainer.test_freq=-1",
            *R3,
        )
        ended = run_command(words, folder=tmp_path)
        assert ended.code == 0, ended.stderr
        found.append(metrics_of(run))
    dense, paged = (metrics[1] for metrics in found)
    assert paged["training/rollout_probs_diff_max"] < 1e-5
    assert 0.4 < paged["actor/router/replay_overlap"] < 1
    for metric in ("actor/router/replay_overlap", "actor/experts/max_over_mean"):
        assert paged[metric] == pytest.approx(dense[metric], rel=1e-6)


@pytest.mark.parametrize(("mode", "keys"), [("R3", R3), ("R2", R2)])
def test_mo8_a_dense_model_has_nothing_to_replay(
    mode: str, keys: tuple[str, ...], material: Material, tmp_path: Path
) -> None:
    words = train_arguments(material, tmp_path / "run", *keys)
    ended = run_command(["plan", *words[1:]], folder=tmp_path)
    assert ended.code == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert f"router_replay.mode='{mode}': the model has no experts" in last


def test_a_missing_expert_is_one_line(material: Material, policy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    folder.mkdir()
    for file in policy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = train_arguments(material, tmp_path / "run", f"actor_rollout_ref.model.path={folder}")
    for command in (words, ["plan", *words[1:]]):
        ended = run_command(command, folder=tmp_path)
        assert ended.code == 2
        last = ended.stderr.strip().splitlines()[-1]
        assert "tensor 'model.layers.1.mlp.experts.5.up_proj.weight' is missing" in last
