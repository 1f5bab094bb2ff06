# SPDX-License-Identifier: Apache-2.0
"""The keys and YAML files of verl's examples for GSM8K with a tool and for search, by version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_ALL = """algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.filter_overlong_prompts=True data.truncation=error data.return_raw_chat=True
actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.critic_warmup=0
trainer.logger=['console','wandb'] trainer.n_gpus_per_node=8 trainer.nnodes=1"""
_GSM8K = """data.max_prompt_length=1024 data.max_response_length=1024 data.train_batch_size=256
actor_rollout_ref.rollout.tensor_model_parallel_size=2 trainer.save_freq=-1 trainer.test_freq=20
trainer.total_epochs=15"""
_SEARCH = """data.max_prompt_length=4096 data.max_response_length=3000 data.train_batch_size=512
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285
actor_rollout_ref.rollout.max_model_len=15000 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.tensor_model_parallel_size=1
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 trainer.save_freq=100 trainer.test_freq=50
trainer.total_epochs=1"""
_STATIC = """actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8"""
_DYNAMIC = """actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192"""
_EXTRA = """actor_rollout_ref.rollout.multi_stage_wake_up=True
actor_rollout_ref.rollout.over_sample_rate=0.1 actor_rollout_ref.rollout.mode=async"""

COMMANDS: Mapping[tuple[str, str], str] = {
    ("gsm8k", "0.5"): f"""{_ALL} {_GSM8K} {_STATIC} actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.rollout.n=16""",
    ("gsm8k", "0.8"): f"""{_ALL} {_GSM8K} {_STATIC} {_EXTRA} trainer.val_before_train=True
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.85
actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.multi_turn.enable=true""",
    ("gsm8k", "0.9"): f"""{_ALL} {_GSM8K} {_STATIC} {_DYNAMIC} {_EXTRA} trainer.balance_batch=True
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.gpu_memory_utilization=0.85
actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.multi_turn.enable=true
actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.rollout.trace.token2text=False
actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.free_cache_engine=True""",
    ("search", "0.5"): f"""{_ALL} {_SEARCH} {_STATIC} data.val_batch_size=256
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.multi_turn.format=hermes""",
    ("search", "0.8"): f"""{_ALL} {_SEARCH} {_STATIC} data.val_batch_size=256
actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2
trainer.val_before_train=False actor_rollout_ref.rollout.multi_turn.format=hermes""",
    ("search", "0.9"): f"""{_ALL} {_SEARCH} {_STATIC} actor_rollout_ref.rollout.name=sglang
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2 trainer.val_before_train=False""",
}
"""The keys beside the files, by example and version. Two of search have ``format=hermes`` added,
because their YAML files say ``qwen``, which is no form of calls."""

_YAML = """
hydra: {{searchpath: ['file://verl/trainer/config']}}
defaults: [ppo_trainer, _self_]
data: {{max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256,
       return_raw_chat: True{data}}}
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn: {{enable: True{turns}}}
"""
_FIVE = _YAML.format(data="", turns=", max_assistant_turns: 5")
_TWO = ", max_assistant_turns: 2, format: {}"
_QWEN = _YAML.format(data=", shuffle: False", turns=_TWO.format("qwen"))
CONFIGS: Mapping[tuple[str, str], str] = {
    ("gsm8k", "0.5"): _FIVE,
    ("gsm8k", "0.8"): _FIVE,
    ("gsm8k", "0.9"): _FIVE,
    ("search", "0.5"): _QWEN,
    ("search", "0.8"): _QWEN,
    ("search", "0.9"): _YAML.format(data=", shuffle: False", turns=_TWO.format("hermes")),
}
"""The files that ``--config-name`` names."""


def words_of(task: str, version: str, folder: Path) -> list[str]:
    """Write the YAML file into ``folder`` and return the command after the name of its module."""
    name = f"{task}_multiturn_grpo"
    (folder / f"{name}.yaml").write_text(CONFIGS[task, version])
    return [f"--config-path={folder}", f"--config-name={name}", *COMMANDS[task, version].split()]
