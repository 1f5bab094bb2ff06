# SPDX-License-Identifier: Apache-2.0
"""Rules between keys. A rule on one key is at its field; rules on devices are in ``device_rules``.

``check_run`` and ``check_sft`` hold for any use of a configuration. ``unbuilt_run`` and
``unbuilt_sft`` name features that are not built yet, which a plan may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from tandem.config.check.async_rules import asynchronous_errors
from tandem.config.check.device_rules import run_device_errors, sft_device_errors
from tandem.config.check.expert_rules import replay_errors
from tandem.config.derived.microbatches import (
    CRITIC_VALUES,
    RUN_MICROBATCHES,
    limits,
)
from tandem.config.derived.pools import CRITIC, generates_only, place_run
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.correction import correction_errors
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.rollout import NATIVE_NAMES
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_OWN_TEMPLATE_ARGUMENTS = ("tokenize", "add_generation_prompt")


def check_run(config: RunConfig) -> None:
    """Raise UserError for the first pair of keys of ``tandem train`` that contradict each other."""
    for error in chain(_run_errors(config), _resume_errors(config.trainer)):
        raise error


def check_sft(config: SftConfig) -> None:
    """Raise UserError for the first pair of keys of ``tandem sft`` that contradict each other."""
    for error in chain(_sft_errors(config), _resume_errors(config.trainer)):
        raise error


def require_reader_of_critic(config: RunConfig, set_keys: Mapping[str, str]) -> None:
    """Raise UserError if keys of the critic are set, and the estimator is tandem's default.

    verl's default estimator reads them. An estimator that is named is meant as it is.

    Args:
        set_keys: the keys that the user has set -> their spelling.
    """
    key = "algorithm.adv_estimator"
    wanted = next((name for name in set_keys if name.startswith("critic.")), None)
    if wanted is None or key in set_keys or config.uses_critic or config.critic.enable is False:
        return
    default = config.algorithm.adv_estimator
    raise UserError(
        set_keys[wanted],
        rule=f"sets up a critic, and {key} is not set: its default, {default}, has none",
        remedy=f"Set {key}=gae for PPO, or {key}={default} to train without a critic.",
    )


def require_random_order(config: RunConfig, unread: Mapping[str, Any]) -> None:
    """Raise UserError if a class that draws rows in random order is named without a random order.

    Args:
        unread: the keys that the user has set and that ``config`` does not hold -> their values.
    """
    key = "data.sampler.class_name"
    name = unread.get(key)
    if name is not None and not config.data.shuffle:
        raise UserError(
            key,
            name,
            rule="draws rows in random order, and data.shuffle=False takes the order of the files",
            remedy="Set data.shuffle=True, or leave data.sampler out.",
        )


def _run_errors(config: RunConfig) -> Iterator[UserError]:
    # Ordered so that the first error is no consequence of a later one.
    yield from _template_errors(config.data.apply_chat_template_kwargs)
    yield from _batch_errors(config)
    yield from run_device_errors(config)
    yield from asynchronous_errors(config)
    yield from _replacement_errors(config)
    yield from _token_errors(config)
    yield from _sampling_errors(config)
    yield from _loss_errors(config)
    roles = config.actor_rollout_ref
    yield from _adapter_errors(roles.model, roles.actor.optim, section=f"{_ACTOR}.optim")
    yield from _schedule_errors(roles.actor.optim, section=f"{_ACTOR}.optim")
    yield from _schedule_errors(config.critic.optim, section="critic.optim")
    yield from replay_errors(config)
    yield from correction_errors(config.algorithm.rollout_correction)
    yield from _critic_errors(config)
    yield from _reward_function_errors(config)
    yield from _estimator_errors(config)
    yield from _kl_errors(config)
    yield from _overlong_errors(config)
    if config.reward_model.enable:
        yield from _reward_model_errors(config)
    yield from _validation_errors(config)


def _batch_errors(config: RunConfig) -> Iterator[UserError]:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    batch = config.data.train_batch_size
    if batch == 0:
        yield UserError(
            "data.train_batch_size",
            batch,
            rule="must be at least 1, unless async_training.* gives the batch",
            remedy="Set data.train_batch_size=1024 (the default).",
        )
        return
    if config.algorithm.filter_groups.enable and 0 < config.most_prompts_generated < batch:
        yield UserError(
            "data.gen_batch_size",
            config.data.gen_batch_size,
            rule="algorithm.filter_groups.max_num_gen_batches of these do not fill a batch of "
            f"{batch}",
            remedy="Set data.gen_batch_size=null, or leave it out.",
        )
    yield from _mini_batch_errors(_ACTOR, actor.ppo_mini_batch_size, batch=batch)
    if config.uses_critic and critic.ppo_mini_batch_size != actor.ppo_mini_batch_size:
        yield from _mini_batch_errors("critic", critic.ppo_mini_batch_size, batch=batch)


def _mini_batch_errors(section: str, mini: int, *, batch: int) -> Iterator[UserError]:
    key = f"{section}.ppo_mini_batch_size"
    if mini > batch:
        yield UserError(
            key,
            mini,
            rule=f"must not exceed data.train_batch_size={batch}",
            remedy=f"Set {key}={batch} or data.train_batch_size={mini}.",
        )
    elif batch % mini:
        fitting = max(size for size in range(1, mini + 1) if batch % size == 0)
        yield UserError(
            key,
            mini,
            rule=f"must divide data.train_batch_size={batch}",
            remedy=f"Set {key}={fitting} or data.train_batch_size={batch - batch % mini}.",
        )


def _adapter_errors(model: ModelConfig, optim: OptimConfig, *, section: str) -> Iterator[UserError]:
    """Yield an error if the optimizer of adapters is another one than AdamW or Adam.

    Args:
        section: the section of the keys of ``optim``.
    """
    if model.trains_adapters and optim.optimizer == "Muon":
        yield UserError(
            f"{section}.optimizer",
            "Muon",
            rule="it would orthogonalise the two factors of an adapter, which is another method "
            "than LoRA",
            remedy=f"Set {section}.optimizer=AdamW, or train all weights.",
        )


def _schedule_errors(optim: OptimConfig, *, section: str) -> Iterator[UserError]:
    """Yield an error if a learning rate that falls shall end above its begin."""
    if optim.lr_scheduler_type == "cosine" and optim.min_lr > optim.lr:
        yield UserError(
            f"{section}.min_lr",
            optim.min_lr,
            rule=f"the learning rate falls to it from {section}.lr={optim.lr}",
            remedy=f"Set {section}.min_lr={optim.lr} or less.",
        )


def _replacement_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if workers that only generate shall be replaced, and cannot be."""
    rollout = config.actor_rollout_ref.rollout
    is_wanted = rollout.max_engine_restarts > 0 and rollout.is_in_process
    if not is_wanted or not generates_only(place_run(config)):
        return
    key = f"{_ROLLOUT}.max_engine_restarts"
    if rollout.enable_param_async or rollout.enable_dual_buffer:
        yield UserError(
            key,
            rollout.max_engine_restarts,
            rule="a worker that ends is not replaced while enable_param_async or "
            "enable_dual_buffer sends weights in the background",
            remedy="Leave it out, or set both of these to False.",
        )
    elif rollout.ranks_per_engine > 1:
        yield UserError(
            key,
            rollout.max_engine_restarts,
            rule="a worker of an engine over several devices (tensor_model_parallel_size="
            f"{rollout.ranks_per_engine}) is not replaced",
            remedy="Leave it out; trainer.max_restarts starts the run again.",
        )


def _token_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if the devices that share a micro-batch cannot hold the longest sequence."""
    layouts = place_run(config).layouts
    longest = trained_model(config).max_tokens
    content = f"one sequence of data.max_prompt_length + data.max_response_length = {longest}"
    for role in RUN_MICROBATCHES:
        task = CRITIC if role == CRITIC_VALUES else role
        if task in layouts:
            bounds = limits(config, role)
            yield from _limit_errors(
                bounds.key,
                bounds.max_tokens,
                ranks=layouts[task].sequence_parallel,
                longest=longest,
                content=content,
            )


def _limit_errors(
    key: str, limit: int | None, *, ranks: int, longest: int, content: str
) -> Iterator[UserError]:
    if limit is not None and limit * ranks < longest:
        times = f" times ulysses_sequence_parallel_size={ranks}" if ranks > 1 else ""
        yield UserError(
            key,
            limit,
            rule=f"must{times} hold {content} tokens",
            remedy=f"Set {key}={-(-longest // ranks)} or higher.",
        )


def _sampling_errors(config: RunConfig) -> Iterator[UserError]:
    rollout, algorithm = config.actor_rollout_ref.rollout, config.algorithm
    comparing = ""
    if algorithm.filter_groups.enable:
        comparing = "algorithm.filter_groups.enable=True"
    if algorithm.estimator.needs_groups:
        comparing = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    if comparing and rollout.n < 2:
        yield UserError(
            f"{_ROLLOUT}.n",
            rollout.n,
            rule=f"must be at least 2 for {comparing}, which compares the samples of a prompt",
            remedy=f"Set {_ROLLOUT}.n=8.",
        )
    elif comparing and not (rollout.do_sample or config.trainer.val_only or config.has_environment):
        yield UserError(
            f"{_ROLLOUT}.do_sample",
            False,
            rule=f"must be True for {comparing}, which compares the samples of a prompt: greedy "
            "decoding makes them equal",
            remedy=f"Set {_ROLLOUT}.do_sample=True.",
        )
    is_greedy = not rollout.do_sample and rollout.temperature != 1
    if is_greedy and (algorithm.rollout_correction.bypass_mode or config.compares_policies):
        yield UserError(
            f"{_ROLLOUT}.temperature",
            rollout.temperature,
            rule=f"must be 1 with {_ROLLOUT}.do_sample=False where log-probs of the rollout are "
            "used (bypass_mode, a correction, a lag), because greedy decoding reports them at "
            "temperature 1",
            remedy=f"Set {_ROLLOUT}.temperature=1.0 or {_ROLLOUT}.do_sample=True.",
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        key = f"{_ROLLOUT}.val_kwargs"
        yield UserError(
            f"{key}.temperature",
            0.0,
            rule=f"must be positive with {key}.do_sample=True",
            remedy=f"Set {key}.temperature=1.0 or {key}.do_sample=False.",
        )


def _loss_errors(config: RunConfig) -> Iterator[UserError]:
    actor = config.actor_rollout_ref.actor
    if actor.policy_loss.loss_mode == "dro" and actor.policy_loss.dro_beta is None:
        key = f"{_ACTOR}.policy_loss.dro_beta"
        yield UserError(
            key, None, rule="must be set with loss_mode=dro", remedy=f"Set {key}=0.1, for example."
        )
    if not actor.policy_loss.traits.accepts_any_low and actor.clip_low >= 1:
        key = f"{_ACTOR}.clip_ratio_low"
        yield UserError(
            key,
            actor.clip_low,
            rule="must be less than 1, because ratios are positive",
            remedy=f"Set {key}=0.2.",
        )


def _critic_errors(config: RunConfig) -> Iterator[UserError]:
    algorithm = config.algorithm
    if algorithm.estimator.needs_values and not config.uses_critic:
        yield UserError(
            "critic.enable",
            False,
            rule=f"must be True or null with algorithm.adv_estimator={algorithm.adv_estimator!r}, "
            "which needs the values of a critic",
            remedy="Set critic.enable=True or algorithm.adv_estimator=grpo.",
        )


def _reward_function_errors(config: RunConfig) -> Iterator[UserError]:
    functions = config.custom_reward_function
    if functions.weights and len(functions.weights) != len(functions.path):
        yield UserError(
            "custom_reward_function.weights",
            functions.weights,
            rule=f"must have one weight for each of the {len(functions.path)} functions of path",
            remedy="Add or remove weights.",
        )
    if config.reward_model.reward_manager == "batch" and not functions.path:
        yield UserError(
            "reward_model.reward_manager",
            "batch",
            rule="needs a function, because built-in rules score one response at a time",
            remedy="Set custom_reward_function.path, or leave reward_manager out.",
        )


def _estimator_errors(config: RunConfig) -> Iterator[UserError]:
    algorithm = config.algorithm
    if algorithm.estimator.needs_squares and algorithm.rollout_correction.bypass_mode:
        key = "algorithm.rollout_correction.bypass_mode"
        yield UserError(
            key,
            True,
            rule="leaves out the pass over the batch that "
            f"algorithm.adv_estimator={algorithm.adv_estimator} needs",
            remedy=f"Set {key}=False.",
        )
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        key = "algorithm.gdpo_reward_keys"
        yield UserError(
            key,
            [],
            rule="must name numbers of the reward with algorithm.adv_estimator=gdpo",
            remedy=f"Set {key}=score, or a list of names that your reward function returns.",
        )
    if weights is not None and len(weights) != len(keys):
        key = "algorithm.gdpo_reward_weights"
        yield UserError(
            key,
            list(weights),
            rule=f"must have a weight for each of gdpo_reward_keys={list(keys)}",
            remedy=f"Set {key}=null.",
        )
    if algorithm.use_kl_in_reward:
        key = "algorithm.use_kl_in_reward"
        yield UserError(
            key,
            True,
            rule="must be False with algorithm.adv_estimator=gdpo, which reads the parts of the "
            "reward and not their sum with the KL",
            remedy=f"Set {key}=False and {_ACTOR}.use_kl_loss=True.",
        )


def _kl_errors(config: RunConfig) -> Iterator[UserError]:
    """Yield an error if one step can take the adaptive coefficient of the KL below 0.

    A step of N sequences multiplies it by at least 1 - 0.2 * N / horizon.
    """
    control, num_sequences = config.algorithm.kl_ctrl, config.sequences_per_step
    is_adaptive = config.algorithm.use_kl_in_reward and control.type == "adaptive"
    if is_adaptive and 5 * control.horizon <= num_sequences:
        key = "algorithm.kl_ctrl.horizon"
        yield UserError(
            key,
            control.horizon,
            rule=f"must be more than a fifth of the {num_sequences} sequences of a step, or a step "
            "can make the coefficient negative",
            remedy=f"Set {key}={num_sequences} or higher.",
        )


def _overlong_errors(config: RunConfig) -> Iterator[UserError]:
    kwargs = config.reward_model.reward_kwargs
    buffer = kwargs.overlong_buffer_cfg
    if config.reward_model.reward_manager != "dapo" or not buffer.enable:
        return
    limit = kwargs.max_resp_len or config.data.max_response_length
    key = "reward_model.reward_kwargs.overlong_buffer_cfg.len"
    if not 0 < buffer.len <= limit:
        yield UserError(
            key,
            buffer.len,
            rule=f"must be at least 1 and at most the longest response, {limit}",
            remedy=f"Set {key}={max(limit // 5, 1)}.",
        )


def _reward_model_errors(config: RunConfig) -> Iterator[UserError]:
    if config.algorithm.filter_groups.enable:
        yield UserError(
            "algorithm.filter_groups.enable",
            True,
            rule="must be False with reward_model.enable=True, because a reward model scores "
            "complete batches, too late to drop groups of them",
            remedy="Set algorithm.filter_groups.enable=False.",
        )
    key, source = "reward_model.model.input_tokenizer", config.reward_model.model.input_tokenizer
    policy = config.actor_rollout_ref.model.path
    if source is not None and source != policy:
        yield UserError(
            key,
            source,
            rule=f"must be actor_rollout_ref.model.path={policy!r}, which tokenizes the responses, "
            "or null if the reward model has the same tokenizer",
            remedy=f"Set {key}=null, or leave it out.",
        )


def _validation_errors(config: RunConfig) -> Iterator[UserError]:
    if not config.trainer.val_only:
        return
    if not config.data.val_files:
        yield UserError(
            "data.val_files",
            [],
            rule="must name a file with trainer.val_only=True",
            remedy="Set data.val_files=FILE or trainer.val_only=False.",
        )
    if not config.trainer.val_before_train:
        yield UserError(
            "trainer.val_before_train",
            False,
            rule="must be True with trainer.val_only=True",
            remedy="Set trainer.val_before_train=True.",
        )


def _sft_errors(config: SftConfig) -> Iterator[UserError]:
    yield from _adapter_errors(config.model, config.optim, section="optim")
    yield from _schedule_errors(config.optim, section="optim")
    yield from _template_errors(config.data.apply_chat_template_kwargs)
    bounds = limits(config, "actor-train")
    yield from _limit_errors(
        bounds.key,
        bounds.max_tokens,
        ranks=config.engine.ulysses_sequence_parallel_size,
        longest=config.data.max_length,
        content=f"one row of data.max_length={config.data.max_length}",
    )
    yield from sft_device_errors(config)


def _template_errors(arguments: Mapping[str, Any]) -> Iterator[UserError]:
    for name in _OWN_TEMPLATE_ARGUMENTS:
        if name in arguments:
            yield UserError(
                f"data.apply_chat_template_kwargs.{name}",
                arguments[name],
                rule="must not be set, because tandem sets it for each prompt",
                remedy="Remove it.",
            )


def _resume_errors(trainer: TrainerConfig) -> Iterator[UserError]:
    path = trainer.resume_from_path
    if trainer.resume_mode == "resume_path" and (path is None or "global_step_" not in path):
        yield UserError(
            "trainer.resume_from_path",
            path,
            rule="must name a folder global_step_N with trainer.resume_mode=resume_path",
            remedy="Set trainer.resume_from_path=DIR/global_step_N or trainer.resume_mode=auto.",
        )


def unbuilt_run(config: RunConfig) -> Iterator[UserError]:
    """Yield an error for each feature that ``tandem train`` needs and that is not built yet."""
    roles = config.actor_rollout_ref
    yield from _unnamed_model(roles.model, prefix="actor_rollout_ref.model")
    name = roles.rollout.name
    if roles.model.trains_adapters and roles.rollout.quantization and name not in NATIVE_NAMES:
        yield UserError(
            f"{_ROLLOUT}.quantization",
            roles.rollout.quantization,
            rule=f"adapters (LoRA) over it are not built for rollout.name={name}",
            remedy=f"Set {_ROLLOUT}.name=native, or leave it out.",
        )
    if config.uses_critic:
        yield from _unbuilt_adapters(config.critic.model, prefix="critic.model")
        yield from _unnamed_model(config.critic.model, prefix="critic.model")
    if config.reward_model.enable:
        yield from _unbuilt_adapters(config.reward_model.model, prefix="reward_model.model")
        yield from _unnamed_model(config.reward_model.model, prefix="reward_model.model")


def unbuilt_sft(config: SftConfig) -> Iterator[UserError]:
    """Yield an error for each feature that ``tandem sft`` needs and that is not built yet."""
    return _unnamed_model(config.model, prefix="model")


def _unbuilt_adapters(model: ModelConfig, *, prefix: str) -> Iterator[UserError]:
    """Yield an error if a model that is not the policy has adapters."""
    rule = "adapters of this model are not built yet"
    if model.lora_rank > 0:
        key = f"{prefix}.lora_rank"
        yield UserError(key, model.lora_rank, rule=rule, remedy=f"Set {key}=0.")
    if model.lora_adapter_path is not None:
        key = f"{prefix}.lora_adapter_path"
        yield UserError(key, model.lora_adapter_path, rule=rule, remedy="Leave it out.")


def _unnamed_model(model: ModelConfig, *, prefix: str) -> Iterator[UserError]:
    if not model.path:
        yield UserError(
            f"{prefix}.path",
            "",
            rule="must name a model",
            remedy=f"Set {prefix}.path=FOLDER or a hub name.",
        )
