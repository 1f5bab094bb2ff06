# SPDX-License-Identifier: Apache-2.0
"""Which keys of the off-policy correction, of ``critic.*`` and of rewards other keys switch off,
and which the correction switches off: tables as in ``switches``.
"""

from __future__ import annotations

from tandem.config.check.read_conditions import Condition, model_conditions, optimizer_conditions
from tandem.config.schema.run import RunConfig

_KEY = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
_NEURAL = tuple(
    f"reward_model.{key}"
    for key in (
        "model",
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "forward_max_token_len_per_gpu",
    )
)
_KWARGS = "reward_model.reward_kwargs"


def _reinforces(config: RunConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and correction.loss_type == "reinforce"


def _clips_to_rollout(config: RunConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and correction.loss_type == "ppo_clip"


CORRECTION_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        (f"{_KEY}.loss_type",),
        lambda c: not c.algorithm.rollout_correction.bypass_mode,
        f"only {_KEY}.bypass_mode=True reads it",
    ),
    Condition(
        (f"{_KEY}.rollout_is",),
        _clips_to_rollout,
        "bypass_mode with loss_type=ppo_clip: the ratio of the loss is the weight",
    ),
    Condition(
        (f"{_KEY}.rollout_is_threshold", f"{_KEY}.rollout_is_batch_normalize"),
        lambda c: c.importance_level is None,
        "no importance weights are applied: see rollout_is, and bypass_mode",
    ),
    Condition(
        (f"{_KEY}.rollout_rs_threshold",),
        lambda c: c.algorithm.rollout_correction.rollout_rs is None,
        f"{_KEY}.rollout_rs=null",
    ),
    Condition(
        (
            f"{_ACTOR}.policy_loss.loss_mode",
            f"{_ACTOR}.clip_ratio",
            f"{_ACTOR}.clip_ratio_low",
            f"{_ACTOR}.clip_ratio_high",
            f"{_ACTOR}.clip_ratio_c",
        ),
        _reinforces,
        f"{_KEY}.loss_type=reinforce does not clip and replaces the loss",
    ),
)

CRITIC_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        ("critic",),
        lambda c: not c.uses_critic,
        "there is no critic: algorithm.adv_estimator is not gae, or critic.enable=False",
    ),
    *model_conditions("critic.model", lambda c: c.critic.model),
    *optimizer_conditions("critic.optim", lambda c: c.critic.optim),
    Condition(
        ("critic.ppo_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu"),
        lambda c: c.critic.use_dynamic_bsz,
        "critic.use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        ("critic.ppo_max_token_len_per_gpu",),
        lambda c: c.critic.ppo_max_token_len_per_gpu not in _critics_limits(c),
        "critic.*micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        ("critic.forward_max_token_len_per_gpu",),
        lambda c: c.critic.forward_tokens is None,
        "critic.forward_micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(("critic.data_loader_seed",), lambda c: not c.critic.shuffle, "critic.shuffle=False"),
    Condition(
        ("critic.loss_scale_factor",),
        lambda c: c.critic.loss_agg_mode != "seq-mean-token-sum-norm",
        "only loss_agg_mode=seq-mean-token-sum-norm reads it",
    ),
)


def _critics_limits(config: RunConfig) -> tuple[int | None, int | None]:
    return config.critic.microbatch_tokens, config.critic.forward_tokens


def _calls_no_function(config: RunConfig) -> bool:
    return config.reward_model.enable and not config.data.val_files


REWARD_CONDITIONS: tuple[Condition, ...] = (
    Condition(_NEURAL, lambda c: not c.reward_model.enable, "reward_model.enable=False"),
    Condition(
        ("reward_model.micro_batch_size_per_gpu",),
        lambda c: c.reward_model.use_dynamic_bsz,
        "reward_model.use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        ("reward_model.forward_max_token_len_per_gpu",),
        lambda c: c.reward_model.microbatch_tokens is None,
        "reward_model.micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        ("reward_model.model.custom_chat_template",),
        lambda c: c.reward_model.model.input_tokenizer is None,
        "reward_model.model.input_tokenizer=null: the policy's tokens are taken as they are",
    ),
    Condition(
        ("reward", "custom_reward_function"),
        _calls_no_function,
        "the reward model scores training, and there is no validation",
    ),
    Condition(
        (f"{_KWARGS}.overlong_buffer_cfg",),
        lambda c: c.reward_model.reward_manager != "dapo",
        "only reward_model.reward_manager=dapo shapes overlong responses",
    ),
    Condition(
        tuple(
            f"{_KWARGS}.{name}"
            for name in (
                "max_resp_len",
                "overlong_buffer_cfg.len",
                "overlong_buffer_cfg.penalty_factor",
                "overlong_buffer_cfg.log",
            )
        ),
        lambda c: not c.reward_model.reward_kwargs.overlong_buffer_cfg.enable,
        "overlong_buffer_cfg.enable=False",
    ),
    Condition(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is not set",
    ),
)
"""The first that holds gives the reason."""
