# SPDX-License-Identifier: Apache-2.0
"""The recipe of Qwen3-30B-A3B for NPUs in a tiny form: two doubles compute what two processes of
the host compute (MO21).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.platforms.record import Platform
from tandem.testing.doubles import write_vendor_package
from tests.distributed.fp32_metrics import differences
from tests.fakes.commands import Conditions, run_command
from tests.fakes.tiny_experts import write_tiny_qwen3_moe
from tests.fakes.tiny_run import REWARDS, Material, metrics_of, repeatable

RECIPE = Path(__file__).parents[2] / "examples/ascend/dapo_qwen3_30b_a3b_base.yaml"
ACTOR = "actor_rollout_ref.actor"
DAPO = (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2",)
GRPO = (
    "algorithm.filter_groups.enable=False",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable=False",
    f"{ACTOR}.clip_ratio_high=0.2",
    f"{ACTOR}.use_kl_loss=True",
    # Ascend's page has its expert models trained by Megatron with these keys.
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.megatron.expert_model_parallel_size=2",
    f"+{ACTOR}.megatron.override_transformer_config.use_flash_attn=True",
)


def tiny(policy: Path, material: Material, run: Path, *, device: str) -> list[str]:
    """Return the recipe's command with other sizes, in fp32, on two devices."""
    return [
        "train",
        str(RECIPE),
        f"actor_rollout_ref.model.path={policy}",
        f"data.train_files={material.train}",
        f"data.val_files={material.test}",
        "data.train_batch_size=4",
        "data.gen_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=12",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.optim.lr=0.01",
        f"{ACTOR}.optim.lr_warmup_steps=0",
        f"{ACTOR}.fsdp_config.dtype=float32",
        f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.n=4",
        f"custom_reward_function.path={REWARDS}",
        "custom_reward_function.name=graded",
        "algorithm.filter_groups.metric=score",
        "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
        f"trainer.default_local_dir={run}",
        "trainer.total_training_steps=2",
        "trainer.device=cpu",
        "actor_rollout_ref.hybrid_engine=False",
        f"pools.actor-train.platform={device}",
        f"pools.generate.platform={'musa' if device == 'npu' else device}",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=1",
    ]


@pytest.mark.parametrize("keys", [DAPO, GRPO], ids=["dapo", "grpo"])
def test_mo21_steps_on_doubles_of_npus_equal_those_on_the_host(
    keys: tuple[str, ...],
    material: Material,
    doubles: Callable[..., Platform],
    tmp_path: Path,
) -> None:
    policy = write_tiny_qwen3_moe(tmp_path / "policy")
    for name in ("npu", "musa"):
        write_vendor_package(tmp_path / "path", doubles(name).name, num_devices=4)
    path = os.pathsep.join([str(tmp_path / "path"), os.environ.get("PYTHONPATH", "")])
    found = {}
    for device in ("npu", "cpu"):
        run = tmp_path / device
        words = [*tiny(policy, material, run, device=device), *keys]
        conditions = Conditions(environment={"PYTHONPATH": path}, forked_workers=True)
        ended = run_command(words, folder=tmp_path, conditions=conditions)
        assert ended.code == 0, ended.stderr
        found[device] = repeatable(metrics_of(run))
    assert not list(differences(found["npu"], found["cpu"]))
    for step in (1, 2):
        assert found["npu"][step]["actor/grad_norm"] > 0
        assert found["npu"][step]["actor/experts/max_over_mean"] >= 1
