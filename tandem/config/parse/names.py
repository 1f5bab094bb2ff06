# SPDX-License-Identifier: Apache-2.0
"""Names that others use for keys: verl's spellings and Hydra groups, and TRL's settings.

Each meaning has one key in the schema. ``parse.keys`` replaces every other spelling by that key. A
group, e.g. ``engine=fsdp``, says that a section takes the file of an option.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tandem.errors import UserError

ALIASES: dict[str, str] = {
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.policy_loss.tau_neg": "actor_rollout_ref.actor.tau_neg",
    "actor_rollout_ref.actor.policy_loss.tau_pos": "actor_rollout_ref.actor.tau_pos",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    ),
    **{
        f"actor_rollout_ref.actor.{engine}.router_replay": "actor_rollout_ref.actor.router_replay"
        for engine in ("megatron", "mindspeed", "veomni")
    },
    "actor_rollout_ref.async_pipeline": "trainer.async_pipeline",
    "async_training.partial_rollout": "actor_rollout_ref.rollout.partial_rollout",
    "async_training.staleness_threshold": "trainer.generate_ahead_steps",
    "rollout.test_freq": "trainer.test_freq",
    "rollout.total_epochs": "trainer.total_epochs",
    "actor_rollout_ref.model.override_config.model_config.max_position_embeddings": (
        "actor_rollout_ref.model.override_config.max_position_embeddings"
    ),
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb"
    ),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb"
    ),
    "critic.fsdp": "critic.model.fsdp_config",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.ulysses_sequence_parallel_size": (
        "critic.model.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "data.balance_dp_token": "trainer.balance_batch",
    "data.enable_thinking_default": "data.multiturn.enable_thinking_default",
    "data.enable_thinking_key": "data.multiturn.enable_thinking_key",
    "data.messages_key": "data.multiturn.messages_key",
    "data.tools_key": "data.multiturn.tools_key",
    "engine.cpu_offload": "engine.param_offload",
    "engine.offload_params": "engine.param_offload",
    "model.fsdp_config": "engine",
    "model.partial_pretrain": "model.path",
    "model.strategy": "engine.strategy",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "pools.actor_train": "pools.actor-train",
    "ray_init": "ray_kwargs.ray_init",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    **{
        f"{manager}{part}": f"reward_model.{key}"
        for manager in ("reward.reward_manager", "reward_manager")
        for part, key in {
            "": "reward_manager",
            ".name": "reward_manager",
            ".source": "reward_loop_source",
            ".module.name": "reward_loop_class_name",
            ".module.path": "reward_loop_module_path",
        }.items()
    },
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.timeout": "reward.timeout_s",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.ulysses_sequence_parallel_size": (
        "reward_model.model.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "trainer.checkpoint": "checkpoint",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.sperated_node_ratios": "trainer.separated_node_ratios",
    "trainer.sperated_node_tasks": "trainer.separated_node_tasks",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    **{
        f"{engine}.mixed_precision.param_dtype": f"{engine}.dtype"
        for engine in (
            "actor_rollout_ref.actor.fsdp_config",
            "actor_rollout_ref.ref.fsdp_config",
            "critic.model.fsdp_config",
            "reward_model.model.fsdp_config",
            "engine",
        )
    },
    **{
        f"{model}.lora.{part}": f"{model}.{key}"
        for model in ("actor_rollout_ref.model", "critic.model", "reward_model.model", "model")
        for part, key in {
            "rank": "lora_rank",
            "alpha": "lora_alpha",
            "target_modules": "target_modules",
            "exclude_modules": "exclude_modules",
            "adapter_path": "lora_adapter_path",
        }.items()
    },
}
"""Spelling -> key or section. A spelling applies only if the schema does not define it itself."""

_NAMES = {"megatron": "Megatron", "veomni": "VeOmni", "torchtitan": "Torchtitan"}

GROUPS: Mapping[str, tuple[str, ...]] = {
    "engine": ("fsdp", "automodel", "megatron", "torchtitan", "veomni"),
    "optim": ("fsdp", "automodel", "megatron", "torchtitan", "veomni"),
    "model": ("hf_model",),
}
"""Section -> its options; the first is the one that is built."""

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
TRL_NAMES: dict[str, tuple[str, ...]] = {
    "beta": (f"{_ACTOR}.kl_loss_coef",),
    "dataset_name": ("data.train_files",),
    "epsilon": (f"{_ACTOR}.clip_ratio",),
    "epsilon_high": (f"{_ACTOR}.clip_ratio_high",),
    "eval_steps": ("trainer.test_freq",),
    "gradient_accumulation_steps": (f"{_ACTOR}.ppo_mini_batch_size", "data.train_batch_size"),
    "gradient_checkpointing": (
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "model.enable_gradient_checkpointing",
    ),
    "learning_rate": (f"{_ACTOR}.optim.lr", "optim.lr"),
    "loss_type": (f"{_ACTOR}.loss_agg_mode",),
    "max_completion_length": ("data.max_response_length", "data.max_length"),
    "max_grad_norm": (f"{_ACTOR}.optim.clip_grad", "optim.clip_grad"),
    "max_length": ("data.max_length", "data.max_response_length"),
    "max_steps": ("trainer.total_training_steps",),
    "model": ("actor_rollout_ref.model.path", "model.path"),
    "model_name_or_path": ("actor_rollout_ref.model.path", "model.path"),
    "num_generations": (f"{_ROLLOUT}.n",),
    "num_iterations": (f"{_ACTOR}.ppo_epochs",),
    "num_train_epochs": ("trainer.total_epochs",),
    "output_dir": ("trainer.default_local_dir",),
    "per_device_train_batch_size": ("data.train_batch_size",),
    "report_to": ("trainer.logger",),
    "reward_funcs": ("custom_reward_function.path",),
    "reward_weights": ("custom_reward_function.weights",),
    "save_steps": ("trainer.save_freq",),
    "scale_rewards": ("algorithm.norm_adv_by_std_in_grpo",),
    "temperature": (f"{_ROLLOUT}.temperature",),
    "top_k": (f"{_ROLLOUT}.top_k",),
    "top_p": (f"{_ROLLOUT}.top_p",),
    "warmup_ratio": (f"{_ACTOR}.optim.lr_warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
    "warmup_steps": (f"{_ACTOR}.optim.lr_warmup_steps", "optim.lr_warmup_steps"),
    "weight_decay": (f"{_ACTOR}.optim.weight_decay", "optim.weight_decay"),
}
"""TRL's name -> the keys with that meaning, of ``tandem train`` first."""


def chooses_built_option(name: str, value: object) -> bool:
    """Return whether ``name=value`` chooses the built option of a group.

    Raises:
        UserError: the option is another one.
    """
    options = GROUPS.get(name)
    if options is None or not isinstance(value, str):
        return False
    built = options[0]
    if value in options[1:]:
        capability = _NAMES.get(value, value)
        raise UserError(
            name, value, rule=f"{capability} is not built", remedy=f"Set {name}={built}."
        )
    return value == built


def key_of_trl(name: str, known: Collection[str]) -> str | None:
    """Return the key among ``known`` that means what TRL's ``name`` means, or None."""
    return next((key for key in TRL_NAMES.get(name, ()) if key in known), None)
