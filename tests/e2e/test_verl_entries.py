# SPDX-License-Identifier: Apache-2.0
"""verl's entry modules, with verl's defaults."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fakes.commands import check_refusal, run_command
from tests.fakes.tiny_run import REWARDS, Material, metrics_of, train_arguments


def quickstart_arguments(material: Material, run: Path) -> list[str]:
    """The keys of verl's quickstart (docs/start/quickstart.rst) with small sizes and paths."""
    return [
        f"data.train_files={material.train}",
        f"data.val_files={material.test}",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=12",
        f"actor_rollout_ref.model.path={material.policy}",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        f"critic.model.path={material.policy}",
        "critic.ppo_micro_batch_size_per_gpu=4",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.logger=console",
        "trainer.val_before_train=False",
        "trainer.nnodes=1",
        "trainer.save_freq=10",
        "trainer.test_freq=10",
        "trainer.total_epochs=1",
        f"custom_reward_function.path={REWARDS}",
        "custom_reward_function.name=graded",
        f"trainer.default_local_dir={run}",
    ]


def test_verls_quickstart_trains_ppo_with_its_critic(material: Material, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = (*quickstart_arguments(material, run), "trainer.n_gpus_per_node=1")
    ended = run_command(["main_ppo", *keys, "trainer.total_training_steps=2"], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    defaults = "defaults of verl: algorithm.adv_estimator=gae actor_rollout_ref.rollout.n=1\n"
    assert defaults in ended.stderr
    if find_spec("vllm") is None:
        assert "rollout.name=vllm: vLLM is not installed, so tandem's native" in ended.stderr
    metrics = metrics_of(run)
    assert list(metrics) == [1, 2]
    assert metrics[1]["critic/vf_loss"] > 0
    assert metrics[2]["critic/lr"] == 1e-5
    assert (run / "global_step_2/critic").is_dir()


def test_verls_eight_devices_are_not_eight_processes_of_the_host(
    material: Material, tmp_path: Path
) -> None:
    batch = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    keys = (*quickstart_arguments(material, tmp_path / "run"), *batch, "trainer.device=cpu")
    ended = run_command(["main_ppo", *keys], folder=tmp_path)
    check_refusal(
        ended,
        "trainer.n_gpus_per_node=8: is verl's default for accelerators",
        "trainer.device=cpu",
        "Set trainer.n_gpus_per_node=1",
    )


def test_a_critic_without_an_estimator_is_refused_by_tandem_train(
    material: Material, tmp_path: Path
) -> None:
    arguments = train_arguments(material, tmp_path / "run", "critic.optim.lr=1e-5")
    ended = run_command(arguments, folder=tmp_path)
    check_refusal(ended, "critic.optim.lr: sets up a critic", "Set algorithm.adv_estimator=gae")


def test_verls_sft_trainer_learns_conversations_at_its_rate(
    material: Material, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
    pq.write_table(pa.Table.from_pylist([{"talk": turns}] * 8), tmp_path / "talk.parquet")
    keys = (
        f"data.train_files={tmp_path}/talk.parquet",
        "data.train_batch_size=4",
        "data.max_length=128",
        "data.messages_key=talk",
        "engine=fsdp",
        "optim=fsdp",
        "model=hf_model",
        f"model.path={material.policy}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.save_freq=after_each_epoch",
        "trainer.total_epochs=2",
    )
    ended = run_command(["sft_trainer", *keys], folder=tmp_path)
    assert ended.code == 0, ended.stderr
    metrics = metrics_of(tmp_path / "run")
    assert [row["train/lr"] for row in metrics.values()] == [1e-3] * 4
    saved = sorted(path.name for path in (tmp_path / "run").glob("global_step_*"))
    assert saved == ["global_step_2", "global_step_4"]
