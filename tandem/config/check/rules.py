# SPDX-License-Identifier: Apache-2.0
"""Rules between keys. What one key alone may be stands at its field, what concerns devices in
``device_rules``.

``check_run`` and ``check_sft`` hold for any use of a configuration; ``check_built_run`` and
``check_built_sft`` refuse what training cannot do yet and the plan may still show. Every error says
the override that mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tandem.config.check.device_rules import run_device_problems, sft_device_problems
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, place_run
from tandem.config.schema.correction import correction_problems
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_REF = "actor_rollout_ref.ref"
_OWN_TEMPLATE_SETTINGS = ("tokenize", "add_generation_prompt")


def check_run(config: RunConfig) -> None:
    """Raise UserError for the first pair of keys of ``tandem train`` that do not fit each other."""
    for problem in chain(_run_problems(config), _resume_problems(config.trainer)):
        raise UserError(problem)


def check_sft(config: SftConfig) -> None:
    """Raise UserError for the first pair of keys of ``tandem sft`` that do not fit each other."""
    for problem in chain(_sft_problems(config), _resume_problems(config.trainer)):
        raise UserError(problem)


def check_built_run(config: RunConfig) -> None:
    """Raise UserError if training would need what is not built yet; call it before training."""
    for problem in unbuilt_run(config):
        raise UserError(problem)


def check_built_sft(config: SftConfig) -> None:
    """As ``check_built_run``, for ``tandem sft``."""
    for problem in unbuilt_sft(config):
        raise UserError(problem)


def _run_problems(config: RunConfig) -> Iterator[str]:
    """In such an order that the first one does not follow from a later one."""
    yield from _template_problems(config.data.apply_chat_template_kwargs)
    yield from _batch_problems(config)
    yield from run_device_problems(config)
    yield from _async_problems(config)
    yield from _token_problems(config)
    yield from _sampling_problems(config)
    yield from correction_problems(config.algorithm.rollout_correction)
    yield from _critic_problems(config)
    yield from _reward_problems(config)
    if config.reward_model.enable:
        yield from _reward_model_problems(config)
    yield from _validation_problems(config)


def _batch_problems(config: RunConfig) -> Iterator[str]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    batch = config.data.train_batch_size
    yield from _mini_batch_problems(_ACTOR, actor.ppo_mini_batch_size, batch=batch)
    if config.uses_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        yield from _mini_batch_problems("critic", critic.ppo_mini_batch_size, batch=batch)


def _mini_batch_problems(section: str, mini: int, *, batch: int) -> Iterator[str]:
    key = f"{section}.ppo_mini_batch_size"
    if mini > batch:
        yield (
            f"{key}={mini}: must not exceed data.train_batch_size={batch}. "
            f"Set {key}={batch} or data.train_batch_size={mini}."
        )
    elif batch % mini:
        fitting = max(size for size in range(1, mini + 1) if batch % size == 0)
        yield (
            f"{key}={mini}: must divide data.train_batch_size={batch}. "
            f"Set {key}={fitting} or data.train_batch_size={batch - batch % mini}."
        )


def _async_problems(config: RunConfig) -> Iterator[str]:
    """Who generates has devices of its own, or takes turns with the trainer where a group says so
    and the engine is not hybrid, which means in step."""
    roles = config.actor_rollout_ref
    if not config.trainer.async_pipeline or place_run(config).generates_apart:
        return
    if not config.trainer.separated_node_tasks:
        halves = "which gives generation half of the devices, "
        yield (
            "trainer.async_pipeline=True: generation must have devices of its own, or take turns "
            "with training. Set actor_rollout_ref.hybrid_engine=False, "
            f"{halves if config.trainer.num_devices > 1 else ''}and to take turns also "
            "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]] "
            "trainer.separated_node_ratios=[1.0]; or set trainer.async_pipeline=False."
        )
    elif roles.hybrid_engine:
        yield (
            "trainer.async_pipeline=True: generate is in the group of actor-train, which a hybrid "
            "engine takes for one after the other. Set actor_rollout_ref.hybrid_engine=False to "
            "let them take turns, or take generate out of that group in "
            "trainer.separated_node_tasks, or set trainer.async_pipeline=False."
        )
    elif config.trainer.max_lag > 0:
        yield from turn_problems(config)


def turn_problems(config: RunConfig) -> Iterator[str]:
    """Sequences go on under the next weights where trainer and rollout take turns."""
    same = "generate is in the group of actor-train, and sequences go on under new weights there"
    apart = "take generate out of that group in trainer.separated_node_tasks."
    if config.trainer.deterministic_async:
        yield (
            f"trainer.deterministic_async=True: {same}. Set trainer.deterministic_async=False, or "
            f"{apart}"
        )
    if not config.actor_rollout_ref.rollout.partial_rollout:
        key = f"{_ROLLOUT}.partial_rollout"
        yield f"{key}=False: {same}. Set {key}=True, or {apart}"


def _token_problems(config: RunConfig) -> Iterator[str]:
    """The devices that share a micro-batch must hold one sequence of the greatest length."""
    roles = config.actor_rollout_ref
    longest = config.data.max_prompt_length + config.data.max_response_length
    what = f"one sequence of data.max_prompt_length + data.max_response_length = {longest}"
    limits = {
        "actor-train": (f"{_ACTOR}.ppo_max_token_len_per_gpu", roles.actor.microbatch_tokens),
        "logp": (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", roles.rollout.microbatch_tokens),
        "ref_logp": (f"{_REF}.log_prob_max_token_len_per_gpu", roles.ref.microbatch_tokens),
        CRITIC: ("critic.ppo_max_token_len_per_gpu", config.critic.microbatch_tokens),
        REWARD_MODEL: (
            "reward_model.forward_max_token_len_per_gpu",
            config.reward_model.microbatch_tokens,
        ),
    }
    layouts = place_run(config).layouts
    for task, (key, limit) in limits.items():
        if task in layouts:
            ranks = layouts[task].sequence_parallel
            yield from _limit_problems(key, limit, ranks=ranks, longest=longest, what=what)
    if CRITIC in layouts:
        ranks, limit = layouts[CRITIC].sequence_parallel, config.critic.forward_tokens
        key = "critic.forward_max_token_len_per_gpu"
        yield from _limit_problems(key, limit, ranks=ranks, longest=longest, what=what)


def _limit_problems(
    key: str, limit: int | None, *, ranks: int, longest: int, what: str
) -> Iterator[str]:
    if limit is not None and limit * ranks < longest:
        times = f" times ulysses_sequence_parallel_size={ranks}" if ranks > 1 else ""
        yield (
            f"{key}={limit}: must{times} hold {what} tokens. "
            f"Set {key}={-(-longest // ranks)} or higher."
        )


def _sampling_problems(config: RunConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    comparing = ""
    if config.algorithm.filter_groups.enable:
        comparing = "algorithm.filter_groups.enable=True"
    if config.algorithm.estimator.needs_groups:
        comparing = f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if comparing and rollout.n < 2:
        yield (
            f"{_ROLLOUT}.n={rollout.n}: must be at least 2 for {comparing}, which compares the "
            f"samples of a prompt. Set {_ROLLOUT}.n=8."
        )
    is_greedy = not rollout.do_sample and rollout.temperature != 1
    correction = config.algorithm.rollout_correction
    if is_greedy and (correction.bypass_mode or config.compares_policies):
        yield (
            f"{_ROLLOUT}.temperature={rollout.temperature}: must be 1 with {_ROLLOUT}.do_sample="
            "False where the rollout's log-probs are used (bypass_mode, correction, a lag), "
            "because greedy ones are those of temperature 1. "
            f"Set {_ROLLOUT}.temperature=1.0 or {_ROLLOUT}.do_sample=True."
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        key = f"{_ROLLOUT}.val_kwargs"
        yield (
            f"{key}.temperature=0.0: must be positive with {key}.do_sample=True. "
            f"Set {key}.temperature=1.0 or {key}.do_sample=False."
        )
    actor = config.actor_rollout_ref.actor
    low = actor.clip_low
    if not actor.policy_loss.traits.clips_log_ratio and low >= 1:
        yield (
            f"{_ACTOR}.clip_ratio_low={low}: must be less than 1, as ratios are positive. "
            f"Set {_ACTOR}.clip_ratio_low=0.2."
        )


def _critic_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.estimator.needs_values and not config.uses_critic:
        yield (
            "critic.enable=False: must be True or null with algorithm.adv_estimator="
            f"{algorithm.adv_estimator!r}, which takes a critic's values. "
            "Set critic.enable=True or algorithm.adv_estimator=grpo."
        )


def _reward_problems(config: RunConfig) -> Iterator[str]:
    kwargs = config.reward_model.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    if config.reward_model.reward_manager != "dapo" or not buffer.enable:
        return
    limit = kwargs.max_resp_len or config.data.max_response_length
    key = "reward_model.reward_kwargs.overlong_buffer_cfg.len"
    if not 0 < buffer.len <= limit:
        yield (
            f"{key}={buffer.len}: must be at least 1 and at most the longest response, {limit}. "
            f"Set {key}={max(limit // 5, 1)}."
        )


def _reward_model_problems(config: RunConfig) -> Iterator[str]:
    if config.algorithm.filter_groups.enable:
        yield (
            "algorithm.filter_groups.enable=True: must be False with reward_model.enable=True, "
            "whose scores come when a batch is complete, too late to drop groups of it. "
            "Set algorithm.filter_groups.enable=False."
        )
    key, source = "reward_model.model.input_tokenizer", config.reward_model.model.input_tokenizer
    policy = config.actor_rollout_ref.model.path
    if source is not None and source != policy:
        yield (
            f"{key}={source!r}: must be actor_rollout_ref.model.path={policy!r}, whose tokens "
            "responses are (they are rendered anew by the reward model's own tokenizer), or null, "
            f"if the reward model has the same. Set {key}=null, or leave it out."
        )


def _validation_problems(config: RunConfig) -> Iterator[str]:
    if not config.trainer.val_only:
        return
    if not config.data.val_files:
        yield (
            "data.val_files=[]: must name a file with trainer.val_only=True. "
            "Set data.val_files=FILE or trainer.val_only=False."
        )
    if not config.trainer.val_before_train:
        yield (
            "trainer.val_before_train=False: must be True with trainer.val_only=True. "
            "Set trainer.val_before_train=True."
        )


def _sft_problems(config: SftConfig) -> Iterator[str]:
    data = config.data
    yield from _template_problems(data.apply_chat_template_kwargs)
    yield from _limit_problems(
        "data.max_token_len_per_gpu",
        data.microbatch_tokens,
        ranks=config.engine.ulysses_sequence_parallel_size,
        longest=data.max_length,
        what=f"one row of data.max_length={data.max_length}",
    )
    yield from sft_device_problems(config)


def _template_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """What rendering decides itself would be overruled without a word."""
    for name in _OWN_TEMPLATE_SETTINGS:
        if name in settings:
            yield (
                f"data.apply_chat_template_kwargs.{name}={settings[name]!r}: is not for the "
                "chat template, it is set where a prompt is rendered. Take it out."
            )


def _resume_problems(trainer: TrainerConfig) -> Iterator[str]:
    path = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and (path is None or "global_step_" not in path):
        yield (
            f"trainer.resume_from_path={path!r}: must name a folder global_step_N with "
            "trainer.resume_mode=resume_path. Set trainer.resume_from_path=DIR/global_step_N "
            "or trainer.resume_mode=auto."
        )


def unbuilt_run(config: RunConfig) -> Iterator[str]:
    """What ``tandem train`` would refuse to start with, one line each."""
    model = config.actor_rollout_ref.model
    if config.actor_rollout_ref.actor.strategy == "megatron":
        yield f"{_ACTOR}.strategy='megatron': is not built yet. Set {_ACTOR}.strategy=fsdp."
    if config.actor_rollout_ref.rollout.multi_turn.enable:
        key = f"{_ROLLOUT}.multi_turn.enable"
        yield f"{key}=True: multi-turn rollouts are not built yet. Set {key}=False."
    yield from _unbuilt_model(model, prefix="actor_rollout_ref.model")
    if config.uses_critic:
        yield from _unbuilt_model(config.critic.model, prefix="critic.model")
    if config.reward_model.enable:
        yield from _unbuilt_model(config.reward_model.model, prefix="reward_model.model")


def unbuilt_sft(config: SftConfig) -> Iterator[str]:
    """What ``tandem sft`` would refuse to start with, one line each."""
    return _unbuilt_model(config.model, prefix="model")


def _unbuilt_model(model: ModelConfig, *, prefix: str) -> Iterator[str]:
    if model.lora_rank > 0:
        key = f"{prefix}.lora_rank"
        yield f"{key}={model.lora_rank}: LoRA is not built yet. Set {key}=0."
    if not model.path:
        yield f"{prefix}.path='': must name a model. Set {prefix}.path=FOLDER or a hub name."
