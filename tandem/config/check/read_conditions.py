# SPDX-License-Identifier: Apache-2.0
"""The conditions on several keys under which a key has no effect.

A condition on a single key is a ``read_if`` of the field. A key that nothing reads is in
``schema.ignored``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

from tandem.config.check.device_rules import run_device_errors
from tandem.config.derived.microbatches import (
    CRITIC_VALUES,
    RUN_MICROBATCHES,
    SFT_MICROBATCHES,
    MicrobatchKeys,
    limits,
)
from tandem.config.derived.pools import (
    CRITIC,
    Placement,
    generates_only,
    needed_tasks,
    reference_of,
)
from tandem.config.derived.trained_model import place, trained_model
from tandem.config.schema.actor import LOSSES, Loss
from tandem.config.schema.algorithm import ESTIMATORS, Estimator
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

Config = RunConfig | SftConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_DIVIDED = "seq-mean-token-sum-norm"
_SHARDING = ("fsdp_size", "reshard_after_forward", "forward_prefetch")
_LOSS_KEYS = dict.fromkeys(key for traits in LOSSES.values() for key in traits.reads)
_ADAPTER_KEYS = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules")
_OF_SERVERS = (
    "dtype",
    "load_format",
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "disable_log_stats",
    "free_cache_engine",
)
"""Keys of an engine of this run that a server of somebody else does not read."""


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Keys, or whole sections, that have no effect while ``holds``, and the reason."""

    keys: tuple[str, ...]
    holds: Callable[[Any], bool]
    reason: str


def _always(config: Config) -> bool:
    return True


def _draws_nothing(config: RunConfig) -> bool:
    rollout = config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.actor.policy_loss.loss_mode == "clip_cov":
        return False  # it chooses tokens at random
    return not (rollout.do_sample or (rollout.val_kwargs.samples and config.data.val_files))


def _every_seed_is_set(config: Config) -> bool:
    adapters = trained_model(config).adapters
    if adapters is not None and adapters.folder is None:
        return False  # it draws them
    if isinstance(config, SftConfig):
        return config.trainer.seed != config.data.seed
    if config.uses_critic:
        return False  # it draws the value head
    roles = config.actor_rollout_ref
    followers = [roles.rollout.seed]
    followers += [config.data.seed] * config.data.shuffle
    followers += [roles.actor.data_loader_seed] * roles.actor.shuffle
    return config.trainer.seed not in followers


def _aggregates_by_sequence(config: RunConfig) -> bool:
    """Return whether no term of a loss is aggregated by the actor's ``loss_agg_mode``.

    The critic takes the mode of the actor if it has none of its own.
    """
    actor, critic = config.actor_rollout_ref.actor, config.critic
    has_other_terms = actor.entropy_coeff != 0 or actor.use_kl_loss
    is_followed = config.uses_critic and critic.loss_agg_mode == actor.loss_agg_mode
    is_sequence_level = actor.policy_loss.traits.is_sequence_level and not _reinforces(config)
    return is_sequence_level and not has_other_terms and not is_followed


def _never_shuffles(config: RunConfig) -> bool:
    """Return whether nothing shuffles by the actor's seed, which a critic may follow."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    is_followed = config.uses_critic and critic.data_loader_seed == actor.data_loader_seed
    return not actor.shuffle and not (is_followed and critic.shuffle)


def _never_divides(config: RunConfig) -> bool:
    """Return whether nothing divides by the actor's ``loss_scale_factor``, which a critic may
    follow.
    """
    actor, critic = config.actor_rollout_ref.actor, config.critic
    is_followed = config.uses_critic and critic.loss_scale_factor == actor.loss_scale_factor
    modes = [actor.loss_agg_mode, *([critic.loss_agg_mode] if is_followed else [])]
    return _DIVIDED not in modes


def _reinforces(config: RunConfig) -> bool:
    return config.algorithm.rollout_correction.reinforces


def _clips_to_rollout(config: RunConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and not correction.reinforces


def _sets_both_sides(config: RunConfig) -> bool:
    actor = config.actor_rollout_ref.actor
    return None not in (actor.clip_ratio_low, actor.clip_ratio_high)


def _not_read_by_choice(
    section: str,
    table: Mapping[str, Estimator] | Mapping[str, Loss],
    *,
    chosen: Callable[[RunConfig], Estimator | Loss],
    chosen_by: str,
) -> Iterator[Exclusion]:
    """Yield an exclusion for each key of ``section`` that only some entries of ``table`` read."""
    readers: dict[str, list[str]] = {}
    for name, traits in table.items():
        for key in traits.reads:
            readers.setdefault(key, []).append(name)
    for key, names in readers.items():
        yield Exclusion(
            (f"{section}.{key}",),
            lambda c, key=key: key not in chosen(c).reads,
            f"only {chosen_by}={'|'.join(names)} reads it",
        )


def _optimizer_exclusions(section: str) -> Iterator[Exclusion]:
    optim = attrgetter(section)

    def is_constant(config: Any) -> bool:
        own = optim(config)
        uses_ratio = own.lr_warmup_steps <= 0 and own.lr_warmup_steps_ratio > 0
        return own.lr_scheduler_type == "constant" and not uses_ratio

    yield Exclusion(
        (f"{section}.total_training_steps",),
        is_constant,
        "the learning rate is constant and lr_warmup_steps_ratio is not used",
    )


def _microbatch_exclusions(table: Mapping[str, MicrobatchKeys]) -> Iterator[Exclusion]:
    for role, keys in table.items():
        yield Exclusion(
            (keys.count,),
            lambda c, role=role: limits(c, role).is_dynamic,
            f"{keys.dynamic}=True fills micro-batches by tokens",
        )
        yield Exclusion(
            (keys.tokens,),
            partial(_counts_sequences, role=role),
            f"micro-batches are bounded by the number of sequences: {keys.count}",
        )


def _counts_sequences(config: Config, *, role: str) -> bool:
    """Return whether no pass of ``role``, or of a role that follows its keys, counts tokens."""
    tokens = attrgetter(limits(config, role).key)(config)
    roles = [role]
    if role == CRITIC:
        roles.append(CRITIC_VALUES)
    if role == "actor-train" and isinstance(config, RunConfig):
        roles += [task for task in ("logp", "ref_logp") if task in needed_tasks(config)]
    return tokens not in [limits(config, role).max_tokens for role in roles]


def _placement(config: Config) -> Placement | None:
    """Return None for a run that cannot be placed; its errors are reported elsewhere."""
    if isinstance(config, RunConfig) and any(run_device_errors(config)):
        return None
    return place(config)


def _is_one_process(config: Config) -> bool:
    placement = _placement(config)
    return placement is not None and placement.is_one_process


def _is_sharded_by_one(config: Config, *, tasks: tuple[str, ...]) -> bool:
    """Return whether no pool with one of the tasks has a second device."""
    placement = _placement(config)
    return placement is not None and all(
        layout.num_ranks == 1 for task, layout in placement.layouts.items() if task in tasks
    )


def _has_one_data_parallel_rank(config: Config) -> bool:
    placement = _placement(config)
    return placement is not None and all(
        layout.data_parallel == 1
        for task, layout in placement.layouts.items()
        if task != "generate"
    )


def _is_not_needed(config: RunConfig, *, task: str) -> bool:
    return task not in needed_tasks(config)


def _time_shared(config: RunConfig) -> bool:
    placement = _placement(config)
    return placement is not None and not placement.generates_apart


def _keeps_cache(config: RunConfig) -> bool:
    return _is_one_process(config) or not _time_shared(config) or config.trainer.max_lag > 0


def _has_first_turns_only(config: RunConfig) -> bool:
    """Return whether tandem's own engines generate, and each sample in one turn."""
    name = config.actor_rollout_ref.rollout.name
    return name in ("auto", "native") and not config.has_environment


def _restarts_nothing(config: RunConfig) -> bool:
    placement = _placement(config)
    is_in_process = config.actor_rollout_ref.rollout.is_in_process
    return is_in_process and placement is not None and not generates_only(placement)


def _groups_decide(config: RunConfig) -> bool:
    """Return whether ``separated_node_tasks`` decides instead of ``hybrid_engine``.

    ``hybrid_engine=False`` is read if generation has devices of its own, or if the asynchronous
    pipeline needs it.
    """
    trainer = config.trainer
    is_synchronous = _time_shared(config) and not trainer.async_pipeline
    hybrid = config.actor_rollout_ref.hybrid_engine
    return bool(trainer.separated_node_tasks) and (hybrid or is_synchronous)


def _has_other_platforms(config: RunConfig) -> bool:
    placement = _placement(config)
    return placement is not None and all(
        pool.platform != config.trainer.device for pool in placement.used_pools
    )


def _layout_exclusions(
    section: str, *, tasks: tuple[str, ...], is_trained: bool = True
) -> Iterator[Exclusion]:
    """Yield the exclusions of ``section``, which lays out weights over the ranks of ``tasks``."""
    layout = attrgetter(section)
    offload = f"{section}.param_offload"
    yield Exclusion(
        tuple(f"{section}.{key}" for key in _SHARDING),
        partial(_is_sharded_by_one, tasks=tasks),
        "one device holds these weights: there is nothing to shard",
    )
    yield Exclusion(
        (f"{section}.offload_policy",), _is_one_process, "not built yet for a run on one device"
    )
    yield Exclusion(
        (offload,),
        lambda c: _is_one_process(c) and c.trainer.device == "cpu",
        "on a CPU weights are in host memory anyway",
    )
    yield Exclusion(
        (offload, f"{section}.optimizer_offload"),
        lambda c: layout(c).offload_policy and not _is_one_process(c),
        f"{section}.offload_policy=True keeps them in host memory all the time",
    )
    if is_trained:
        yield Exclusion(
            (offload,),
            lambda c: layout(c).model_dtype == layout(c).dtype and _is_one_process(c),
            "model_dtype and dtype are the same: passes use the trained weights themselves, which "
            "stay on the device",
        )


def _shares_base(config: RunConfig) -> bool:
    placement = _placement(config)
    if placement is None or "ref_logp" not in placement.layouts:
        return False
    return reference_of(placement.pool_of("ref_logp"), config=config) != "ref_logp"


def _adapter_exclusions(section: str, *, layout: str) -> Iterator[Exclusion]:
    """Yield the exclusions of the keys of adapters in ``section``."""
    model = attrgetter(section)
    yield Exclusion(
        tuple(f"{section}.{key}" for key in _ADAPTER_KEYS[1:]),
        lambda c: not model(c).trains_adapters,
        f"{section}.lora_rank=0: all weights are trained",
    )
    yield Exclusion(
        tuple(f"{section}.{key}" for key in _ADAPTER_KEYS),
        lambda c: model(c).lora_adapter_path is not None,
        f"the adapter of {section}.lora_adapter_path says it",
    )
    yield Exclusion(
        (f"{layout}.model_dtype",),
        lambda c: model(c).trains_adapters,
        "adapters are stored in float32, and their base in the precision of the passes: dtype",
    )


def _unbuilt_adapters(section: str, role: str) -> Iterator[Exclusion]:
    keys = (*_ADAPTER_KEYS, "lora_adapter_path")
    yield Exclusion(
        tuple(f"{section}.{key}" for key in keys), _always, f"not built yet: adapters of {role}"
    )


ONE_PROCESS = "there is one process: nothing is dealt, gathered or transferred"

_SHARED = (
    Exclusion(("trainer.seed",), _every_seed_is_set, "every other seed is set and replaces it"),
    Exclusion(
        ("ray_kwargs", "trainer.ray_wait_register_center_timeout"), _is_one_process, ONE_PROCESS
    ),
    Exclusion(
        ("trainer.balance_batch",),
        _has_one_data_parallel_rank,
        "micro-batches are computed one at a time: there is nothing to balance",
    ),
)

RUN_EXCLUSIONS: tuple[Exclusion, ...] = (
    *_adapter_exclusions("actor_rollout_ref.model", layout=f"{_ACTOR}.fsdp_config"),
    *_unbuilt_adapters("critic.model", "a critic"),
    *_unbuilt_adapters("reward_model.model", "a reward model"),
    Exclusion(
        ("actor_rollout_ref.ref.fsdp_config",),
        _shares_base,
        "the reference computes with the base of the adapters, which is there already",
    ),
    Exclusion(
        (f"{_CORRECTION}.rollout_is",),
        _clips_to_rollout,
        "bypass_mode with loss_type=ppo_clip: the ratio of the loss is the weight",
    ),
    Exclusion(
        (f"{_ACTOR}.policy_loss.loss_mode", *(f"{_ACTOR}.{key}" for key in _LOSS_KEYS)),
        _reinforces,
        f"{_CORRECTION}.loss_type=reinforce does not clip and replaces the loss",
    ),
    *_optimizer_exclusions(f"{_ACTOR}.optim"),
    *_optimizer_exclusions("critic.optim"),
    Exclusion(
        (f"{_ACTOR}.strategy",),
        lambda c: c.actor_rollout_ref.actor.strategy == "fsdp2",
        "fsdp and fsdp2 are one engine",
    ),
    *_not_read_by_choice(
        "algorithm",
        ESTIMATORS,
        chosen=lambda c: c.algorithm.estimator,
        chosen_by="algorithm.adv_estimator",
    ),
    Exclusion(
        (f"{_ACTOR}.clip_ratio",),
        _sets_both_sides,
        "clip_ratio_low and clip_ratio_high are both set and replace it",
    ),
    *_not_read_by_choice(
        _ACTOR,
        LOSSES,
        chosen=lambda c: c.actor_rollout_ref.actor.policy_loss.traits,
        chosen_by=f"{_ACTOR}.policy_loss.loss_mode",
    ),
    Exclusion(
        (f"{_ACTOR}.loss_agg_mode",),
        _aggregates_by_sequence,
        "this loss_mode is always aggregated by seq-mean-token-mean",
    ),
    Exclusion(
        (f"{_ACTOR}.data_loader_seed",),
        _never_shuffles,
        f"it is read only with {_ACTOR}.shuffle=True",
    ),
    Exclusion(
        (f"{_ACTOR}.loss_scale_factor",),
        _never_divides,
        f"it is read only with {_ACTOR}.loss_agg_mode={_DIVIDED}",
    ),
    *_microbatch_exclusions(RUN_MICROBATCHES),
    Exclusion(
        (f"{_ROLLOUT}.seed",),
        _draws_nothing,
        "generation is greedy, in training and in validation",
    ),
    *_layout_exclusions(f"{_ACTOR}.fsdp_config", tasks=("actor-train", "logp")),
    *_layout_exclusions("actor_rollout_ref.ref.fsdp_config", tasks=("ref_logp",), is_trained=False),
    *_layout_exclusions("critic.model.fsdp_config", tasks=("actor-train",)),
    *_layout_exclusions("reward_model.model.fsdp_config", tasks=("actor-train",), is_trained=False),
    Exclusion(
        (
            "actor_rollout_ref.nccl_timeout",
            f"{_ROLLOUT}.param_update_preduce_bucket_size_mb",
            f"{_ROLLOUT}.param_update_consume_bucket_size_mb",
            "pools.transport",
        ),
        _is_one_process,
        ONE_PROCESS,
    ),
    *(
        Exclusion(
            (f"pools.{task}.platform",),
            partial(_is_not_needed, task=task),
            "nothing in the run needs this task",
        )
        for task in ("logp", "ref_logp")
    ),
    Exclusion(
        (f"{_ROLLOUT}.enable_dual_buffer", f"{_ROLLOUT}.enable_param_async"),
        _time_shared,
        "the same devices train and generate: both pause while weights are updated",
    ),
    Exclusion(
        (f"{_ROLLOUT}.enable_prefix_caching",),
        _has_first_turns_only,
        "samples of one prompt always share its keys and values, and none has a further turn",
    ),
    Exclusion(
        (f"{_ROLLOUT}.enable_prefix_caching",),
        lambda c: c.actor_rollout_ref.rollout.name == "hf",
        "generation by transformers keeps nothing for later requests",
    ),
    Exclusion(
        (f"{_ROLLOUT}.max_engine_restarts",),
        _restarts_nothing,
        "the engine has no processes of its own, and no worker only generates",
    ),
    Exclusion(
        (f"{_ROLLOUT}.free_cache_engine",),
        _keeps_cache,
        "only several devices that train and generate one after the other free the cache",
    ),
    Exclusion(
        tuple(f"{_ROLLOUT}.{key}" for key in _OF_SERVERS),
        lambda c: c.actor_rollout_ref.rollout.attaches_servers,
        "servers are attached (engine_kwargs.vllm.urls): it is set where they are started",
    ),
    Exclusion(
        ("actor_rollout_ref.hybrid_engine",),
        _groups_decide,
        "trainer.separated_node_tasks is set and decides",
    ),
    Exclusion(
        ("trainer.device",),
        _has_other_platforms,
        "pools.*.platform names the platform of every pool",
    ),
    *_SHARED,
)
"""The exclusions of ``tandem train``; the first that holds for a key gives the reason."""

SFT_EXCLUSIONS: tuple[Exclusion, ...] = (
    *_adapter_exclusions("model", layout="engine"),
    *_optimizer_exclusions("optim"),
    *_microbatch_exclusions(SFT_MICROBATCHES),
    Exclusion(
        ("model.custom_chat_template",),
        lambda c: c.data.chat_template is not None,
        "data.chat_template is set and replaces it",
    ),
    *_layout_exclusions("engine", tasks=("actor-train",)),
    Exclusion(
        ("engine.param_offload",),
        lambda c: c.engine.param_offload and not _is_one_process(c),
        "every step uses the weights: engine.offload_policy keeps them in host memory",
    ),
    Exclusion(("nccl_timeout",), _is_one_process, ONE_PROCESS),
    *_SHARED,
)
"""The exclusions of ``tandem sft``; the first that holds for a key gives the reason."""
