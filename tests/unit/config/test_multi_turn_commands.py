# SPDX-License-Identifier: Apache-2.0
"""M8: commands of verl that train agents are planned as they are; their forms differ by version.

The keys are those of verl's examples for GSM8K with a tool, with a user, and for search (0.8).
ReTool's are in tests/unit/examples/test_retool.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.entries import spelled_out
from tandem.cli.plan import parse
from tandem.errors import UserError

GRPO = """algorithm.adv_estimator=grpo data.train_batch_size=256 data.max_prompt_length=1024
data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
data.return_raw_chat=True actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.gpu_memory_utilization=0.85 actor_rollout_ref.rollout.n=16
trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=-1 trainer.test_freq=20"""
TURNS = "actor_rollout_ref.rollout.multi_turn"
YAML = """
hydra: {searchpath: ['file://verl/trainer/config']}
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, return_raw_chat: True}
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn: {enable: True, max_assistant_turns: 5}
"""
SERVER = """    sglang_rollout_mode: server
    server: {timeout: 60, max_attempts: 3, retry_delay: 2, max_connections: 1000}
"""


def planned(folder: Path, yaml: str, *keys: str) -> dict[str, Any]:
    """Return what ``tandem plan --elsewhere`` finds of a command with a YAML file of verl."""
    (folder / "gsm8k_multiturn_grpo.yaml").write_text(yaml)
    words = ["python3", "-m", "verl.trainer.main_ppo", f"--config-path={folder}"]
    words += ["--config-name=gsm8k_multiturn_grpo", *GRPO.split(), *keys]
    words += [f"data.{kind}_files=/data/gsm8k/{kind}.parquet" for kind in ("train", "val")]
    parsed = parse(spelled_out(["plan", "--elsewhere", *words])[1:])
    return json.loads(json.dumps(parsed.plan.to_dict()))


def test_m8_a_tool_of_gsm8k_with_the_keys_of_over_sampling(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        YAML,
        f"{TURNS}.tool_config_path=/verl/tool_config/gsm8k_tool_config.yaml",
        "actor_rollout_ref.rollout.multi_stage_wake_up=True",
        "actor_rollout_ref.rollout.over_sample_rate=0.1",
        "actor_rollout_ref.rollout.mode=async",
    )
    assert not plan["refusals"] and not plan["unknown_keys"]
    assert plan["config"]["actor_rollout_ref"]["rollout"]["multi_turn"]["max_assistant_turns"] == 5
    reasons = plan["keys_without_effect"]
    assert "passes it over" in reasons["actor_rollout_ref.rollout.over_sample_rate"]
    assert "actor_rollout_ref.rollout.mode" in reasons


def test_m8_a_simulated_user_and_the_keys_of_a_server(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, YAML + SERVER, f"{TURNS}.interaction_config_path=/verl/gsm8k_interaction.yaml"
    )
    assert not plan["refusals"] and not plan["unknown_keys"]
    reasons = " ".join(plan["keys_without_effect"])
    assert "rollout.sglang_rollout_mode" in reasons and "rollout.server" in reasons


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (f"{TURNS}.format=qwen", "format='qwen': must be one of hermes.* Set .*format=hermes"),
        (
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B",
            "agent_loop_manager_class='a.B'",
        ),
    ],
)
def test_m8_a_key_that_cannot_be_meant_is_an_error_with_its_remedy(
    tmp_path: Path, key: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        planned(tmp_path, YAML, f"{TURNS}.tool_config_path=/verl/search.yaml", key)
