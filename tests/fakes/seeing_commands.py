# SPDX-License-Identifier: Apache-2.0
"""The words of verl's scripts for models that see, as bash passes them on.

The two scripts of geo3k are ``examples/grpo_trainer/run_qwen2_5_vl_7b_fsdp.sh`` and
``run_qwen3_vl_8b_fsdp.sh`` (verl 1dda039) with ``VERL_USE_UV=0``. Their arguments differ in model,
name and one key. The script of demonstrations is ``examples/sft/vlm/run_qwen3_vl_2b_fsdp.sh`` (verl
b569a57) with the defaults of its variables, started in the home directory.
"""

from __future__ import annotations

_SHARED = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False data.image_key=images
data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048
data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.strategy=fsdp2
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.enable_chunked_prefill=False actor_rollout_ref.rollout.n=5
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True
actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576
actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.balance_batch=True
trainer.logger=["console","wandb"] trainer.project_name=verl_grpo_geo3k trainer.n_gpus_per_node=8
trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15
actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
actor_rollout_ref.rollout.enforce_eager=False actor_rollout_ref.rollout.free_cache_engine=True
ray_kwargs.ray_init.runtime_env.py_executable=null
"""
_FILES = (("train", "train"), ("val", "test"))
_OWN = {
    "qwen2_5_vl": """
actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct
trainer.experiment_name=qwen2_5_vl_7b_vllm_fsdp actor_rollout_ref.rollout.multi_stage_wake_up=True
""",
    "qwen3_vl": """
actor_rollout_ref.model.path=Qwen/Qwen3-VL-8B-Instruct
trainer.experiment_name=qwen3_vl_8b_grpo_vllm_fsdp_20260822_1724
""",
}


def geo3k_arguments(family: str, *, home: str) -> list[str]:
    """Return the arguments of the script for a family in a home directory."""
    files = [f"data.{part}_files={home}/data/geo3k/{name}.parquet" for part, name in _FILES]
    return [*files, *_SHARED.split(), *_OWN[family].split()]


_DEMONSTRATIONS = """torchrun --standalone --nnodes=1 --nproc-per-node=8 -m verl.trainer.sft_trainer
data.train_files={home}/data/pokemon-gpt4o-captions/train.parquet data.train_batch_size=96
data.max_length=2048 data.pad_mode=no_padding data.truncation=error data.use_dynamic_bsz=True
data.max_token_len_per_gpu=65536 model.path={home}/model/Qwen3-VL-2B-Instruct
model.use_remove_padding=True engine=fsdp optim=fsdp optim.lr=2e-5 optim.lr_warmup_steps_ratio=0.01
optim.weight_decay=0.1 optim.betas=[0.9,0.95] optim.clip_grad=1.0 optim.min_lr_ratio=0.1
optim.warmup_style=cosine engine.ulysses_sequence_parallel_size=2 engine.strategy=fsdp2
engine.fsdp_size=-1 trainer.test_freq=-1 trainer.save_freq=4000 trainer.logger=[console,wandb]
trainer.project_name=verl_sft_test
trainer.experiment_name=pokemon-qwen3-2b-fsdp-fsdp2-sp2-fsdp-1202a1 trainer.total_epochs=10
trainer.default_local_dir={home}/open_verl/sft/verl_sft_test/pokemon-qwen3-2b-fsdp-fsdp2-sp2-fsdp-1202a1
trainer.resume_mode=auto trainer.max_ckpt_to_keep=5
checkpoint.save_contents=[model,optimizer,extra]"""


def demonstration_words(*, home: str) -> list[str]:
    """Return the command of the script of demonstrations in a home directory."""
    return [word.replace("{home}", home) for word in _DEMONSTRATIONS.split()]
