# SPDX-License-Identifier: Apache-2.0
"""Keys that were set and change nothing, with the reason: no key is silently without effect.

Two kinds: keys that nothing reads (marked at their field), and keys that other keys switch off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tandem.config.actor import ActorConfig
from tandem.config.keys import find_key
from tandem.config.optim import OptimConfig
from tandem.config.overrides import LoadedConfig
from tandem.config.run import RunConfig
from tandem.config.sft import SftConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_GRPO = ("grpo", "grpo_vectorized", "grpo_passk")
_DISCOUNTING = ("gae", "reinforce_plus_plus", "remax")
_ENGINES_NOT_BUILT = ("vllm", "sglang", "trtllm")


@dataclass(frozen=True, slots=True)
class Condition:
    """Keys (or sections) that have no effect while ``holds``."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str


def _packs_by_tokens(section: Any) -> bool:
    return section.log_prob_use_dynamic_bsz


def _packs_by_count(section: Any) -> bool:
    is_counted = section.log_prob_micro_batch_size_per_gpu is not None
    return is_counted and not section.log_prob_use_dynamic_bsz


def _aggregates_by_sequence(actor: ActorConfig) -> bool:
    """Sequence losses choose their aggregation themselves; entropy and KL follow the config."""
    has_other_terms = actor.entropy_coeff != 0 or actor.use_kl_loss
    return actor.policy_loss.loss_mode in ("gspo", "geo_mean") and not has_other_terms


def _has_no_length(optim: OptimConfig) -> bool:
    uses_ratio = optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio > 0
    return optim.lr_scheduler_type == "constant" and not uses_ratio


def _has_no_overlong_penalty(config: RunConfig) -> bool:
    return not config.reward_model.reward_kwargs.overlong_buffer_cfg.enable


RUN_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        ("algorithm.kl_ctrl", "algorithm.kl_penalty"),
        lambda c: not c.algorithm.use_kl_in_reward,
        "algorithm.use_kl_in_reward=False",
    ),
    Condition(
        ("algorithm.kl_ctrl.horizon", "algorithm.kl_ctrl.target_kl"),
        lambda c: c.algorithm.kl_ctrl.type == "fixed",
        "algorithm.kl_ctrl.type=fixed",
    ),
    Condition(
        (
            "algorithm.filter_groups.metric",
            "algorithm.filter_groups.max_num_gen_batches",
            "data.gen_batch_size",
        ),
        lambda c: not c.algorithm.filter_groups.enable,
        "algorithm.filter_groups.enable=False",
    ),
    Condition(
        ("algorithm.norm_adv_by_std_in_grpo",),
        lambda c: c.algorithm.adv_estimator not in _GRPO,
        "only the estimators grpo and grpo_passk read it",
    ),
    Condition(
        ("algorithm.gamma",),
        lambda c: c.algorithm.adv_estimator not in _DISCOUNTING,
        "only the estimators gae, reinforce_plus_plus and remax read it",
    ),
    Condition(
        ("algorithm.lam",),
        lambda c: c.algorithm.adv_estimator != "gae",
        "only the estimator gae reads it",
    ),
    Condition(
        (f"{_ACTOR}.kl_loss_coef", f"{_ACTOR}.kl_loss_type"),
        lambda c: not c.actor_rollout_ref.actor.use_kl_loss,
        f"{_ACTOR}.use_kl_loss=False",
    ),
    Condition(
        (f"{_ACTOR}.clip_ratio",),
        lambda c: None not in _clip_pair(c),
        "clip_ratio_low and clip_ratio_high are both set and replace it",
    ),
    Condition(
        (f"{_ACTOR}.clip_ratio_c",),
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode != "vanilla",
        "only loss_mode=vanilla reads it",
    ),
    Condition(
        tuple(f"{_ACTOR}.clip_ratio{side}" for side in ("", "_low", "_high")),
        lambda c: c.actor_rollout_ref.actor.policy_loss.loss_mode == "gpg",
        "loss_mode=gpg does not clip",
    ),
    Condition(
        (f"{_ACTOR}.loss_agg_mode",),
        lambda c: _aggregates_by_sequence(c.actor_rollout_ref.actor),
        "this loss_mode is always aggregated by seq-mean-token-mean",
    ),
    Condition(
        (f"{_ACTOR}.loss_scale_factor",),
        lambda c: c.actor_rollout_ref.actor.loss_agg_mode != "seq-mean-token-sum-norm",
        "only loss_agg_mode=seq-mean-token-sum-norm reads it",
    ),
    Condition(
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",),
        lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz,
        "use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        (f"{_ACTOR}.data_loader_seed",),
        lambda c: not c.actor_rollout_ref.actor.shuffle,
        f"{_ACTOR}.shuffle=False",
    ),
    Condition(
        (_REF,),
        lambda c: not c.needs_reference,
        "there is no reference: use_kl_loss=False and use_kl_in_reward=False",
    ),
    Condition(
        (f"{_REF}.log_prob_micro_batch_size_per_gpu",),
        lambda c: _packs_by_tokens(c.actor_rollout_ref.ref),
        "log_prob_use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        (f"{_REF}.log_prob_max_token_len_per_gpu",),
        lambda c: _packs_by_count(c.actor_rollout_ref.ref),
        "log_prob_micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        tuple(
            f"{_ROLLOUT}.log_prob_{name}"
            for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
        ),
        lambda c: not c.needs_old_log_probs,
        "the policy need not score the batch: the update is strictly on-policy or in bypass_mode",
    ),
    Condition(
        (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",),
        lambda c: _packs_by_tokens(c.actor_rollout_ref.rollout),
        "log_prob_use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",),
        lambda c: _packs_by_count(c.actor_rollout_ref.rollout),
        "log_prob_micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        (f"{_ROLLOUT}.name",),
        lambda c: c.actor_rollout_ref.rollout.name in _ENGINES_NOT_BUILT,
        "engine not built yet: the native engine is used",
    ),
    Condition(
        tuple(f"{_ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p")),
        lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample,
        "val_kwargs.do_sample=False is greedy",
    ),
    Condition(
        (f"{_ROLLOUT}.top_k", f"{_ROLLOUT}.top_p"),
        lambda c: not c.actor_rollout_ref.rollout.do_sample,
        f"{_ROLLOUT}.do_sample=False is greedy",
    ),
    Condition(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=True drops longer prompts before they could be truncated",
    ),
    Condition(
        ("reward_model.reward_kwargs.overlong_buffer_cfg",),
        lambda c: c.reward_model.reward_manager != "dapo",
        "only reward_model.reward_manager=dapo shapes overlong responses",
    ),
    Condition(
        tuple(
            f"reward_model.reward_kwargs.{name}"
            for name in (
                "max_resp_len",
                "overlong_buffer_cfg.len",
                "overlong_buffer_cfg.penalty_factor",
                "overlong_buffer_cfg.log",
            )
        ),
        _has_no_overlong_penalty,
        "overlong_buffer_cfg.enable=False",
    ),
    Condition(
        ("custom_reward_function.name", "custom_reward_function.reward_kwargs"),
        lambda c: c.custom_reward_function.path is None,
        "custom_reward_function.path is not set",
    ),
    Condition(
        (f"{_ROLLOUT}.val_kwargs", "data.val_max_samples", "trainer.test_freq"),
        lambda c: not c.data.val_files,
        "there is no validation: data.val_files is empty",
    ),
)
"""What switches off keys of ``tandem train``; the first that holds gives the reason."""


def _clip_pair(config: RunConfig) -> tuple[float | None, float | None]:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low, actor.clip_ratio_high


def _optimizer_conditions(prefix: str, optim: Callable[[Any], Any]) -> tuple[Condition, ...]:
    return (
        Condition(
            (f"{prefix}.min_lr_ratio", f"{prefix}.num_cycles"),
            lambda c: optim(c).lr_scheduler_type == "constant",
            "lr_scheduler_type=constant",
        ),
        Condition(
            (f"{prefix}.lr_warmup_steps_ratio",),
            lambda c: optim(c).lr_warmup_steps > 0,
            "lr_warmup_steps is set and replaces it",
        ),
        Condition(
            (f"{prefix}.total_training_steps",),
            lambda c: _has_no_length(optim(c)),
            "the rate is constant and lr_warmup_steps_ratio is not used",
        ),
        Condition(
            (f"{prefix}.muon_lr",),
            lambda c: optim(c).optimizer != "Muon",
            "only optimizer=Muon reads it",
        ),
    )


SHARED_CONDITIONS: tuple[Condition, ...] = (
    Condition(("data.seed",), lambda c: not c.data.shuffle, "data.shuffle=False"),
    Condition(
        ("trainer.resume_from_path",),
        lambda c: c.trainer.resume_mode != "resume_path",
        "trainer.resume_mode is not resume_path",
    ),
    Condition(
        ("trainer.max_actor_ckpt_to_keep",),
        lambda c: c.trainer.save_freq <= 0,
        "trainer.save_freq is not positive: nothing is saved",
    ),
)

SFT_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        ("data.micro_batch_size_per_gpu",),
        lambda c: c.data.use_dynamic_bsz,
        "data.use_dynamic_bsz=True fills micro-batches by tokens",
    ),
    Condition(
        ("data.max_token_len_per_gpu",),
        lambda c: c.data.micro_batch_size_per_gpu is not None and not c.data.use_dynamic_bsz,
        "data.micro_batch_size_per_gpu bounds micro-batches by count",
    ),
    Condition(
        tuple(
            f"data.{part}_{key}" for part in ("prompt", "response") for key in ("key", "dict_keys")
        ),
        lambda c: c.data.multiturn.enable,
        "data.multiturn.enable=True reads conversations",
    ),
    Condition(
        ("data.multiturn.messages_key",),
        lambda c: not c.data.multiturn.enable,
        "data.multiturn.enable=False",
    ),
    Condition(
        ("data.val_max_samples", "trainer.test_freq"),
        lambda c: not c.data.val_files,
        "there is no validation: data.val_files is empty",
    ),
)


def keys_without_effect(
    loaded: LoadedConfig[RunConfig] | LoadedConfig[SftConfig],
) -> Mapping[str, str]:
    """The keys that were set in vain, as they were spelt -> why."""
    config = loaded.config
    if isinstance(config, RunConfig):
        conditions = RUN_CONDITIONS + _optimizer_conditions(
            f"{_ACTOR}.optim", lambda c: c.actor_rollout_ref.actor.optim
        )
    else:
        conditions = SFT_CONDITIONS + _optimizer_conditions("optim", lambda c: c.optim)
    active = [c for c in (*conditions, *SHARED_CONDITIONS) if c.holds(config)]
    found = {
        spelling: _reason(type(config), name, active=active)
        for name, spelling in loaded.set_keys.items()
    }
    return {spelling: reason for spelling, reason in found.items() if reason}


def _reason(schema: type[BaseModel], name: str, *, active: list[Condition]) -> str:
    key = find_key(schema, name)
    if key is not None and key.no_effect:
        return key.no_effect
    for condition in active:
        if any(name == known or name.startswith(f"{known}.") for known in condition.keys):
            return condition.reason
    return ""
