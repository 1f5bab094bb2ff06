# SPDX-License-Identifier: Apache-2.0
"""The words of published commands that train adapters, as their shell scripts start them.

The scripts' variables have their defaults, and HOME is ``{home}``. Sources: verl
(verl-project/verl, 2026-08) ``examples/tuning/lora`` and ``examples/sft/gsm8k``; its form of 2025
(volcengine/verl) ``examples/sft/gsm8k/run_qwen3_8b_sft_peft_sp2_npu.sh``; and verl-recipe
``retool``. The rows SFT-PEFT and ReTool-SFT of verl's table for Ascend are the last four.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_GRPO = """python3 -m verl.trainer.main_ppo
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False
data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.fsdp_config.param_offload=True
trainer.balance_batch=True trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
ray_kwargs.ray_init.runtime_env.py_executable=null """
_GSM8K = """data.train_files={home}/data/gsm8k/train.parquet
data.val_files={home}/data/gsm8k/test.parquet actor_rollout_ref.model.path=Qwen/Qwen3-8B
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.rollout.load_format=safetensors
actor_rollout_ref.rollout.layered_summon=True trainer.project_name=verl_grpo_lora_gsm8k """
_GRPO_QWEN3 = """data.train_batch_size=64 data.max_prompt_length=512
data.max_response_length=1024 actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.actor.ppo_mini_batch_size=32
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=12288
trainer.logger=["console","wandb"] trainer.experiment_name=qwen3_8b_lora_vllm_fsdp
trainer.n_gpus_per_node=2 trainer.val_before_train=False trainer.total_epochs=15"""
_GRPO_FROM_ADAPTER = """data.train_batch_size=1024 data.max_prompt_length=512
data.max_response_length=1024 actor_rollout_ref.model.use_shm=True
actor_rollout_ref.model.lora_adapter_path={home}/adapter actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=12288
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=12288
trainer.logger=["console","wandb"] trainer.experiment_name=qwen3_8b_lora_from_adapter_vllm_fsdp
trainer.n_gpus_per_node=8 trainer.total_epochs=15"""
_GRPO_MERGE = """data.train_batch_size=128 data.max_prompt_length=1024
data.max_response_length=1024 +actor_rollout_ref.model.lora.merge=True
actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=64
actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.model_dtype=bf16
actor_rollout_ref.actor.optim.lr=1.0e-05 actor_rollout_ref.actor.ppo_mini_batch_size=64
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576 actor_rollout_ref.ref.strategy=fsdp2
actor_rollout_ref.ref.fsdp_config.model_dtype=bf16 trainer.val_before_train=True
trainer.logger=["console","tensorboard","file"]
trainer.experiment_name=qwen3_8b_lora_merge_vllm_fsdp trainer.n_gpus_per_node=8
trainer.total_epochs=1"""
_GRPO_SEEING = """data.train_files={home}/data/geo3k/train.parquet
data.val_files={home}/data/geo3k/test.parquet data.image_key=images data.train_batch_size=512
data.max_prompt_length=1024 data.max_response_length=2048
actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.model.lora_rank=64
actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.model.target_modules=all-linear
actor_rollout_ref.model.exclude_modules=.*visual.* actor_rollout_ref.actor.optim.lr=3e-6
actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576
actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.rollout.enable_chunked_prefill=False
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=False
actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
trainer.logger=["console","wandb"] trainer.project_name=verl_grpo_lora_geo3k
trainer.experiment_name=qwen2_5_vl_7b_lora_vllm_fsdp trainer.n_gpus_per_node=8
trainer.total_epochs=15"""
_PEFT_2025 = """torchrun --standalone --nnodes=1 --nproc_per_node=8
-m verl.trainer.fsdp_sft_trainer data.train_files={home}/data/gsm8k/train.parquet
data.val_files={home}/data/gsm8k/test.parquet data.prompt_key=extra_info
data.response_key=extra_info optim.lr=1e-4 data.prompt_dict_keys=[question]
+data.response_dict_keys=[answer] data.micro_batch_size_per_gpu=64
model.partial_pretrain=Qwen/Qwen3-8B trainer.default_local_dir={home}/save
trainer.project_name=gsm8k-sft trainer.experiment_name=gsm8k-sft-qwen3-8b-instruct
trainer.logger=console trainer.total_epochs=2 model.lora_rank=32 model.lora_alpha=16
model.target_modules=all-linear model.strategy=fsdp ulysses_sequence_parallel_size=2
use_remove_padding=true"""
_PEFT_2026 = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer
data.train_files={home}/data/gsm8k/train.parquet data.val_files={home}/data/gsm8k/test.parquet
data.micro_batch_size_per_gpu=64 data.messages_key=messages data.ignore_input_ids_mismatch=True
optim.lr=1e-4 engine=fsdp engine.ulysses_sequence_parallel_size=2 model.path=Qwen/Qwen3-8B
model.use_remove_padding=true trainer.default_local_dir={home}/save
trainer.project_name=gsm8k-sft trainer.experiment_name=gsm8k-sft-qwen3-8b-instruct
trainer.logger=["console","wandb"] trainer.total_epochs=2 model.lora_rank=32
model.lora_alpha=16 model.target_modules=all-linear"""
_RETOOL_2025 = """torchrun --nnodes=1 --nproc_per_node=8 --master-addr=127.0.0.1
--master-port=29500 --node-rank=0 -m verl.trainer.fsdp_sft_trainer
data.train_files={home}/ReTool-SFT/train.parquet data.val_files={home}/ReTool-SFT/train.parquet
data.max_length=16384 data.train_batch_size=32 data.multiturn.enable=true
data.multiturn.messages_key=messages data.multiturn.tools_key=tools
data.micro_batch_size_per_gpu=4 model.partial_pretrain={home}/model/Qwen2.5-7B-Instruct
model.strategy=fsdp trainer.default_local_dir={home}/save
trainer.project_name=wuxibin-multiturn-sft
trainer.experiment_name=multiturn-sft-qwen-2.5-7b-instruct trainer.logger=["console","wandb"]
trainer.total_epochs=6 trainer.save_freq=62 ulysses_sequence_parallel_size=4
use_remove_padding=true"""
_RETOOL_2026 = """torchrun --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer
data.train_files={home}/ReTool-SFT/train.parquet data.val_files={home}/ReTool-SFT/train.parquet
data.max_length=16384 data.train_batch_size=64 data.micro_batch_size_per_gpu=8
model.path={home}/model/Qwen2.5-7B-Instruct engine=fsdp trainer.default_local_dir={home}/save
trainer.project_name=retool_sft trainer.experiment_name=multiturn-sft-qwen-2.5-7b-instruct
data.ignore_input_ids_mismatch=True trainer.logger=["console"] trainer.total_epochs=6
trainer.save_freq=100 trainer.device=npu engine.ulysses_sequence_parallel_size=2
model.use_remove_padding=true"""

LORA_COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run_qwen3_8b_fsdp": _GRPO + _GSM8K + _GRPO_QWEN3,
        "run_qwen3_8b_from_adapter_fsdp": _GRPO + _GSM8K + _GRPO_FROM_ADAPTER,
        "run_qwen3_8b_merge_fsdp": _GRPO + _GSM8K + _GRPO_MERGE,
        "run_qwen2_5_vl_7b_fsdp": _GRPO + _GRPO_SEEING,
        "sft_peft_2025": _PEFT_2025,
        "sft_peft_2026": _PEFT_2026,
        "retool_sft_2025": _RETOOL_2025,
        "retool_sft_2026": _RETOOL_2026,
    }
)
"""The commands by the names of their scripts."""


def lora_words(name: str, home: Path) -> list[str]:
    """Return the words of a command."""
    return [word.replace("{home}", str(home)) for word in LORA_COMMANDS[name].split()]
