# SPDX-License-Identifier: Apache-2.0
"""Which keys other keys switch off, and why: tables that ``effects`` reads.

What nothing reads at all is marked at its field and does not stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.schema.actor import LOSSES, ActorConfig, Loss
from tandem.config.schema.algorithm import ESTIMATORS, Estimator
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
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


def _bounds_nothing_by_tokens(config: RunConfig) -> bool:
    """No pass that is made packs by the tokens that the actor's limit allows."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    limits = [actor.microbatch_tokens]
    limits += [rollout.microbatch_tokens] * config.needs_old_log_probs
    limits += [config.actor_rollout_ref.ref.microbatch_tokens] * config.needs_reference
    return actor.ppo_max_token_len_per_gpu not in limits


def _draws_nothing(config: RunConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    return not (rollout.do_sample or (rollout.val_kwargs.do_sample and config.data.val_files))


def _seeds_nothing(config: RunConfig | SftConfig) -> bool:
    """Every other seed that is read was set to something else."""
    if isinstance(config, SftConfig):
        return config.trainer.seed != config.data.seed
    if config.uses_critic:
        return False  # it draws the value head
    roles = config.actor_rollout_ref
    followers = [roles.rollout.seed]
    followers += [config.data.seed] * config.data.shuffle
    followers += [roles.actor.data_loader_seed] * roles.actor.shuffle
    return config.trainer.seed not in followers


def _aggregates_by_sequence(actor: ActorConfig) -> bool:
    """Sequence losses choose their aggregation themselves; entropy and KL follow the config."""
    has_other_terms = actor.entropy_coeff != 0 or actor.use_kl_loss
    return actor.policy_loss.traits.is_sequence_level and not has_other_terms


def _has_no_length(optim: OptimConfig) -> bool:
    uses_ratio = optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio > 0
    return optim.lr_scheduler_type == "constant" and not uses_ratio


def optimizer_conditions(prefix: str, optim: Callable[[Any], Any]) -> tuple[Condition, ...]:
    """Of the section of an optimizer, ``prefix``, which ``optim`` finds."""
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


def model_conditions(prefix: str, model: Callable[[Any], Any]) -> tuple[Condition, ...]:
    """As ``optimizer_conditions``, of a trained model."""
    return (
        Condition(
            (f"{prefix}.recompute_granularity",),
            lambda c: not model(c).enable_gradient_checkpointing,
            f"{prefix}.enable_gradient_checkpointing=False: nothing is recomputed",
        ),
    )


def _unread_by_choice(
    section: str,
    table: Mapping[str, Estimator] | Mapping[str, Loss],
    *,
    chosen: Callable[[RunConfig], Estimator | Loss],
    chosen_by: str,
) -> Iterator[Condition]:
    """Yield a condition for each key of ``section`` that only some entries of ``table`` read."""
    readers: dict[str, list[str]] = {}
    for name, traits in table.items():
        for key in traits.reads:
            readers.setdefault(key, []).append(name)
    for key, names in readers.items():
        yield Condition(
            (f"{section}.{key}",),
            lambda c, key=key: key not in chosen(c).reads,
            f"only {chosen_by}={'|'.join(names)} reads it",
        )


RUN_CONDITIONS: tuple[Condition, ...] = (
    *model_conditions("actor_rollout_ref.model", lambda c: c.actor_rollout_ref.model),
    *optimizer_conditions(f"{_ACTOR}.optim", lambda c: c.actor_rollout_ref.actor.optim),
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
        ("data.gen_batch_size",),
        lambda c: c.algorithm.filter_groups.max_num_gen_batches == 0,
        "only algorithm.filter_groups.max_num_gen_batches counts in such batches, and it is 0",
    ),
    Condition(
        (
            f"{_ACTOR}.optim",
            "critic",
            "reward_model.model",
            "trainer.rollout_data_dir",
            "trainer.save_freq",
            "trainer.test_freq",
            "trainer.total_epochs",
            "trainer.total_training_steps",
        ),
        lambda c: c.trainer.val_only,
        "trainer.val_only=True: nothing is trained",
    ),
    Condition(
        (f"{_ACTOR}.strategy",),
        lambda c: c.actor_rollout_ref.actor.strategy == "fsdp2",
        "fsdp and fsdp2 are one engine",
    ),
    *_unread_by_choice(
        "algorithm",
        ESTIMATORS,
        chosen=lambda c: c.algorithm.estimator,
        chosen_by="algorithm.adv_estimator",
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
    *_unread_by_choice(
        _ACTOR,
        LOSSES,
        chosen=lambda c: c.actor_rollout_ref.actor.policy_loss.traits,
        chosen_by=f"{_ACTOR}.policy_loss.loss_mode",
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
        (f"{_ACTOR}.ppo_max_token_len_per_gpu",),
        _bounds_nothing_by_tokens,
        "micro-batches are bounded by count: *micro_batch_size_per_gpu",
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
        (f"{_ROLLOUT}.seed",),
        _draws_nothing,
        "generation is greedy, in training and in validation",
    ),
    Condition(
        (f"{_ROLLOUT}.name",),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        "the model's family decides: native where our decoder computes it, else hf, and then this "
        "says that it is meant",
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
        ("trainer.async_pipeline", "trainer.deterministic_async", f"{_ROLLOUT}.partial_rollout"),
        lambda c: c.trainer.max_lag == 0,
        "the largest lag is 0: a batch is generated, then it is trained on",
    ),
    Condition(
        ("trainer.generate_ahead_steps",),
        lambda c: not c.trainer.async_pipeline,
        "trainer.async_pipeline=False",
    ),
    Condition(
        (f"{_ROLLOUT}.partial_rollout",),
        lambda c: c.trainer.deterministic_async,
        "trainer.deterministic_async=True: rounds end under the weights they began with",
    ),
    Condition(
        ("data.truncation",),
        lambda c: c.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=True drops longer prompts before they could be truncated",
    ),
    Condition(
        (
            f"{_ROLLOUT}.val_kwargs",
            "data.val_max_samples",
            "trainer.log_val_generations",
            "trainer.test_freq",
            "trainer.val_before_train",
            "trainer.validation_data_dir",
        ),
        lambda c: not c.data.val_files,
        "there is no validation: data.val_files is empty",
    ),
)
"""What switches off keys of ``tandem train``; the first that holds gives the reason."""


def _clip_pair(config: RunConfig) -> tuple[float | None, float | None]:
    actor = config.actor_rollout_ref.actor
    return actor.clip_ratio_low, actor.clip_ratio_high


SHARED_CONDITIONS: tuple[Condition, ...] = (
    Condition(("data.seed",), lambda c: not c.data.shuffle, "data.shuffle=False"),
    Condition(("trainer.seed",), _seeds_nothing, "every other seed is set and replaces it"),
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
    *model_conditions("model", lambda c: c.model),
    *optimizer_conditions("optim", lambda c: c.optim),
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
        ("model.custom_chat_template",),
        lambda c: c.data.chat_template is not None,
        "data.chat_template is set and replaces it",
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
        ("data.val_max_samples", "trainer.test_freq", "trainer.val_before_train"),
        lambda c: not c.data.val_files,
        "there is no validation: data.val_files is empty",
    ),
)
