# SPDX-License-Identifier: Apache-2.0
"""Published commands of verl on Ascend and of dots.rl: expanded by bash, then planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.entries import spelled_out
from tandem.cli.plan import parse, plan_arguments
from tandem.errors import UserError
from tests.fakes.published_commands import ASCEND_COMMAND, RED_MOE_COMMAND, words_of
from tests.fakes.seeing_commands import demonstration_words, geo3k_arguments

RED_MOE_SNIPPET = r"""
python3 -m verl.trainer.main_ppo \
+actor_rollout_ref.async_pipeline=True \
+trainer.sperated_node_ratios=[0.5,0.5] \
+trainer.sperated_node_tasks=[[logp,actor-train,ref_logp],generate] \
+actor_rollout_ref.rollout.enable_dual_buffer=True \
+actor_rollout_ref.rollout.enable_param_async=False \
+actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb=512 \
+actor_rollout_ref.rollout.param_update_consume_bucket_size_mb=128 \
+trainer.generate_ahead_steps=2 \
trainer.n_gpus_per_node=8
"""

ASYNCHRONOUS_KEYS = (
    "trainer.async_pipeline",
    "trainer.generate_ahead_steps",
    "actor_rollout_ref.rollout.enable_dual_buffer",
)
PLACING_KEYS = (
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb",
    "actor_rollout_ref.rollout.param_update_consume_bucket_size_mb",
    "trainer.sperated_node_tasks",
    "trainer.sperated_node_ratios",
)
ASYNC_KEYS_OF_SEED_2 = {
    *ASYNCHRONOUS_KEYS,
    *PLACING_KEYS,
    "actor_rollout_ref.async_pipeline",
    "actor_rollout_ref.rollout.enable_param_async",
}


def planned(command: str, folder: Path, **variables: str) -> dict[str, Any]:
    words = ["--config-name=ppo_trainer", *words_of(command, folder, **variables)]
    plan = plan_arguments(words).to_dict()
    return json.loads(json.dumps(plan))


def test_the_ascend_command_plans_as_verl_would_run_it(gsm8k_home: Path) -> None:
    plan = planned(ASCEND_COMMAND, gsm8k_home, HOME=str(gsm8k_home))
    assert plan["steps_per_epoch"] == plan["total_training_steps"] == 58
    assert plan["sequences_per_step"] == 640
    assert plan["optimizer_steps_per_step"] == 2
    assert plan["validation_steps"] == [*range(0, 56, 5), 58]
    assert plan["unknown_keys"] == []
    assert [pool["devices"] for pool in plan["pools"]] == [8]
    assert plan["config"]["actor_rollout_ref"]["actor"]["optim"]["lr"] == 5e-7
    assert plan["config"]["trainer"]["logger"] == ["console"]


def test_the_ascend_command_names_its_keys_without_effect(gsm8k_home: Path) -> None:
    plan = planned(ASCEND_COMMAND, gsm8k_home, HOME=str(gsm8k_home))
    assert set(plan["keys_without_effect"]) == {
        "data.truncation",
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "algorithm.kl_ctrl.kl_coef",
    }


def test_missing_data_is_a_warning_and_a_null_field(tmp_path: Path) -> None:
    plan = planned(ASCEND_COMMAND, tmp_path, HOME=str(tmp_path))
    assert plan["total_training_steps"] is plan["steps_per_epoch"] is None
    assert plan["validation_steps"] is None
    assert plan["sequences_per_step"] == 640
    assert any("train.parquet" in warning for warning in plan["warnings"])


RED_MOE_VARIABLES = {
    "ROOT_PATH": "/somewhere",
    "TRAIN_DATA_PATH": "train.parquet",
    "TEST_DATA_PATH": "test.parquet",
    "MODEL_PATH": "red-moe",
    "EXP_NAME": "run_1",
    "RANK": "0",
    "WORLD_SIZE": "2",
    "max_prompt_length": "1024",
    "max_response_length": "2048",
}


def test_the_red_moe_command_is_accepted(tmp_path: Path) -> None:
    plan = planned(RED_MOE_COMMAND, tmp_path, **RED_MOE_VARIABLES)
    assert plan["sequences_per_step"] == 2048
    assert plan["optimizer_steps_per_step"] == 1
    assert plan["unknown_keys"] == []
    assert [(pool["tasks"], pool["unused_tasks"]) for pool in plan["pools"]] == [
        (["actor-train"], ["logp"]),
        (["ref_logp"], []),
        (["generate"], []),
    ]
    assert [pool["devices"] for pool in plan["pools"]] == [8, 4, 4]
    assert not set(PLACING_KEYS) & set(plan["keys_without_effect"])
    assert not set(ASYNCHRONOUS_KEYS) & set(plan["keys_without_effect"])
    assert plan["config"]["trainer"]["generate_ahead_steps"] == 1
    assert plan["config"]["trainer"]["async_pipeline"]
    assert plan["config"]["actor_rollout_ref"]["actor"]["strategy"] == "megatron"
    assert plan["config"]["actor_rollout_ref"]["rollout"]["max_num_batched_tokens"] == 3072
    assert "redmoe_megatron.yaml does not exist" in "\n".join(plan["warnings"])
    roles = plan["config"]["actor_rollout_ref"]
    sizes = [roles[x]["fsdp_config"]["expert_model_parallel_size"] for x in ("actor", "ref")]
    assert sizes == [8, 1]


def test_mo20_the_plan_says_what_each_megatron_key_of_red_moe_does(tmp_path: Path) -> None:
    effects = planned(RED_MOE_COMMAND, tmp_path, **RED_MOE_VARIABLES)["key_effects"]
    own = {name: text for name, text in effects.items() if ".megatron." in name}
    assert len(own) == 12
    unread = {name.split(".", 1)[1] for name, text in own.items() if text.startswith("no effect: ")}
    assert unread == {
        *(f"{role}.megatron.grad_offload" for role in ("actor", "ref")),
        "ref.megatron.optimizer_offload",
    }
    experts = own["actor_rollout_ref.actor.megatron.expert_model_parallel_size"]
    assert experts.startswith("read as actor_rollout_ref.actor.fsdp_config.expert_model_parallel_")


def test_mo15_experts_beyond_the_pool_name_the_largest_size_that_works(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        planned(RED_MOE_COMMAND, tmp_path, **{**RED_MOE_VARIABLES, "WORLD_SIZE": "1"})
    key = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    devices = "the 4 device(s) of actor-train"
    assert str(caught.value) == f"{key}=8: must divide {devices}. Set {key}=4."


def test_an_unset_world_size_is_one_line_with_its_cause(tmp_path: Path) -> None:
    variables = {**RED_MOE_VARIABLES, "WORLD_SIZE": ""}
    with pytest.raises(UserError) as caught:
        planned(RED_MOE_COMMAND, tmp_path, **variables)
    assert str(caught.value) == (
        "trainer.nnodes='': value is empty. Is $WORLD_SIZE set? Set trainer.nnodes=1 (the default)."
    )


def test_the_options_of_the_pull_request_are_accepted(tmp_path: Path) -> None:
    plan = planned(RED_MOE_SNIPPET, tmp_path)
    assert [pool["devices"] for pool in plan["pools"]] == [4, 4]
    assert plan["unknown_keys"] == []
    assert plan["keys_without_effect"] == {}
    assert plan["config"]["trainer"]["async_pipeline"]
    assert "actor_rollout_ref.async_pipeline is read as trainer.async_pipeline" in plan["warnings"]


@pytest.mark.parametrize(
    ("command", "variables"), [(RED_MOE_COMMAND, "RED_MOE"), (RED_MOE_SNIPPET, "")]
)
def test_the_effect_of_every_key_is_told(tmp_path: Path, command: str, variables: str) -> None:
    given = RED_MOE_VARIABLES if variables else {}
    plan = planned(command, tmp_path, **given)
    words = [word for word in words_of(command, tmp_path, **given) if not word.startswith("--")]
    names = [word.split("=", maxsplit=1)[0].lstrip("+") for word in words]
    of_runs = [name for name in names if not name.startswith("hydra.")]
    assert set(plan["key_effects"]) >= set(of_runs)
    assert all(plan["key_effects"].values())
    in_vain = {name for name, told in plan["key_effects"].items() if told.startswith("no effect")}
    assert in_vain == set(plan["keys_without_effect"])
    for key in ASYNC_KEYS_OF_SEED_2 & set(of_runs):
        assert not plan["key_effects"][key].startswith("no effect"), key


GEO3K = """algorithm.adv_estimator=grpo data.train_files=$HOME/data/geo3k/train.parquet
data.val_files=$HOME/data/geo3k/test.parquet data.train_batch_size=512 data.max_prompt_length=1024
data.max_response_length=2048 data.filter_overlong_prompts=True data.truncation='error'
data.image_key=images actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20
actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=20 trainer.nnodes=1
actor_rollout_ref.ref.fsdp_config.param_offload=True algorithm.use_kl_in_reward=False
trainer.critic_warmup=0 trainer.project_name='verl_grpo_example_geo3k'
trainer.experiment_name='qwen2_5_vl_7b_function_rm' trainer.n_gpus_per_node=8
trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15"""
OF_VLLM = """+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True
actor_rollout_ref.rollout.multi_stage_wake_up=True trainer.logger=['console','wandb']"""
OF_NPU = """actor_rollout_ref.actor.use_torch_compile=False trainer.device=npu
trainer.logger=['console']"""


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_verls_scripts_of_geo3k_plan(family: str, tmp_path: Path) -> None:
    arguments = geo3k_arguments(family, home=str(tmp_path))
    plan = plan_arguments(["--config-name=ppo_trainer", *arguments]).to_dict()
    assert plan["sequences_per_step"] == 2560 and plan["optimizer_steps_per_step"] == 4
    assert not plan["refusals"] and not plan["unknown_keys"]
    assert any("tandem prepare geo3k --output" in line for line in plan["warnings"])


def test_VL14_verls_script_of_demonstrations_with_pictures_plans(tmp_path: Path) -> None:  # noqa: N802
    """VL14: ``examples/sft/vlm/run_qwen3_vl_2b_fsdp.sh``, word for word."""
    words = spelled_out(["plan", "--elsewhere", *demonstration_words(home=str(tmp_path))])
    plan = parse(words[1:]).plan.to_dict()
    assert not plan["refusals"] and not plan["unknown_keys"]
    assert plan["sequences_per_step"] == 96
    assert [pool["devices"] for pool in plan["pools"]] == [8]
    config = plan["config"]
    assert config["data"]["multiturn"]["enable"] and config["data"]["truncation"] == "error"
    assert config["optim"]["betas"] == [0.9, 0.95]
    assert config["optim"]["lr_scheduler_type"] == "cosine"
    assert config["engine"]["ulysses_sequence_parallel_size"] == 2


@pytest.mark.parametrize("others", [OF_VLLM, OF_NPU])
def test_the_commands_of_geo3k_plan(others: str, tmp_path: Path) -> None:
    plan = planned(
        " ".join(["python3 -m verl.trainer.main_ppo", *GEO3K.split(), *others.split()]),
        tmp_path,
        HOME=str(tmp_path),
    )
    assert plan["sequences_per_step"] == 2560
    assert not plan["refusals"] and not plan["unknown_keys"]
    assert "data.image_key" not in plan["keys_without_effect"]
