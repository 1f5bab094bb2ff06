# SPDX-License-Identifier: Apache-2.0
"""The refusal of a run that does not fit its devices' memory, with overrides that make it fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from tandem.config.derived.pools import CRITIC, REWARD_MODEL, models_beside
from tandem.config.derived.sizes import CACHE_PAGE_TOKENS, ModelSizes
from tandem.config.plan.memory import (
    BYTES,
    GIB,
    NONE_BESIDE,
    longest_sequence,
    plan_memory,
    training_tokens,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_ACTOR = "actor_rollout_ref.actor."
_CACHE_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
_ALSO_SET = {
    CRITIC: {
        f"{_ACTOR}fsdp_config.": "critic.model.fsdp_config.",
        _ACTOR: "critic.",
        "actor_rollout_ref.model.": "critic.model.",
    },
    REWARD_MODEL: {
        f"{_ACTOR}fsdp_config.": "reward_model.model.fsdp_config.",
        f"{_ACTOR}use_dynamic_bsz": "reward_model.use_dynamic_bsz",
        f"{_ACTOR}ppo_max_token_len_per_gpu": "reward_model.forward_max_token_len_per_gpu",
    },
}
"""What is as the policy's keys in a model beside it; the first that fits counts."""

ConfigT = TypeVar("ConfigT", bound=BaseModel)


def require_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    available_bytes: int,
    beside: Mapping[str, ModelSizes] = NONE_BESIDE,
    recomputes_parts: bool = True,
) -> None:
    """Raise UserError, with an override that fits, if a device of the run needs more than
    ``available_bytes``. ``recomputes_parts``: of layers, as the model can; else whole ones."""
    plans = plan_memory(config, sizes, beside=beside, available_bytes=available_bytes)
    name, plan = max(plans.items(), key=lambda entry: entry[1].total)
    if plan.total <= available_bytes:
        return
    candidates = _candidates(
        config,
        smaller=_smaller_generation(config, sizes, available_bytes=available_bytes),
        recomputes_parts=recomputes_parts,
    )
    remedy = _remedy(
        config, sizes, candidates=candidates, beside=beside, available_bytes=available_bytes
    )
    held = plan.critic + plan.weights + plan.gradients + plan.optimizer + plan.gathered
    frozen = plan.reference + plan.reward_model + plan.rollout
    whose = "this run" if config.trainer.num_devices == 1 else f"a device of {name}"
    raise UserError(
        f"memory: {whose} needs about {plan.total / GIB:.0f} GiB (weights, gradients and "
        f"optimizer {held / GIB:.0f}, reference and rollout "
        f"{frozen / GIB:.0f}, cache {plan.cache / GIB:.0f}, activations "
        f"{plan.activations / GIB:.0f}) of {available_bytes / GIB:.0f} GiB. {remedy}"
    )


def require_cache(config: RunConfig, sizes: ModelSizes, *, available_bytes: int) -> None:
    """Raise UserError if the paged cache of a device could not hold the longest sequence, whatever
    else waits."""
    data, share = config.data, config.actor_rollout_ref.rollout.gpu_memory_utilization
    weights, needed = _least_generating(config, sizes)
    if int(share * available_bytes) >= weights + needed:
        return
    fitting = math.ceil(100 * (weights + needed) / available_bytes) / 100
    raise UserError(
        f"{_CACHE_SHARE}={share:g}: of {available_bytes / GIB:.0f} GiB that leaves no room beside "
        f"the weights ({weights / GIB:.1f} GiB) for the keys and values of the longest sequence "
        f"({needed / GIB:.1f} GiB: data.max_prompt_length={data.max_prompt_length} + "
        f"data.max_response_length={data.max_response_length} tokens). "
        + (f"Set {_CACHE_SHARE}={fitting:g}." if fitting <= 1 else "Shorten the sequences.")
    )


def _least_generating(config: RunConfig, sizes: ModelSizes) -> tuple[int, int]:
    """Bytes of the weights that generate, and of the cache of one longest sequence."""
    computed = BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    pages = -(-longest_sequence(config) // CACHE_PAGE_TOKENS)
    cached = sizes.cache_numbers_per_token * pages * CACHE_PAGE_TOKENS
    return computed * sizes.num_parameters, computed * cached


def _remedy(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    candidates: Iterable[Mapping[str, Any]],
    beside: Mapping[str, ModelSizes],
    available_bytes: int,
) -> str:
    """The first overrides that make it fit."""
    for candidate in candidates:
        changed, overrides = config, _for_all(config, candidate)
        for key, value in overrides.items():
            changed = _with(changed, key.split("."), value=value)
        plans = plan_memory(changed, sizes, beside=beside, available_bytes=available_bytes)
        if all(plan.total <= available_bytes for plan in plans.values()):
            return f"Set {' '.join(f'{key}={value}' for key, value in overrides.items())}."
    return "Use a smaller model, more devices or devices with more memory."


def _for_all(config: RunConfig | SftConfig, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is set for the policy is set for the models beside it, too."""
    if isinstance(config, SftConfig):
        return overrides
    settings = dict(overrides)
    for name in models_beside(config):
        for key, value in overrides.items():
            fitting = [section for section in _ALSO_SET[name] if key.startswith(section)]
            for section in fitting[:1]:
                settings[_ALSO_SET[name][section] + key.removeprefix(section)] = value
    return settings


def _smaller_generation(
    config: RunConfig | SftConfig, sizes: ModelSizes, *, available_bytes: int
) -> list[dict[str, Any]]:
    """What makes generation take less beside training, the least at last."""
    if isinstance(config, SftConfig):
        return []
    if config.trainer.max_lag == 0:
        several = config.trainer.num_devices > 1
        return [{"actor_rollout_ref.rollout.free_cache_engine": True}] if several else []
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    least = sum(_least_generating(config, sizes)) / available_bytes
    return [{_CACHE_SHARE: lower} for lower in (0.4, 0.3, 0.2) if least < lower < share]


def _candidates(
    config: RunConfig | SftConfig, *, smaller: Sequence[dict[str, Any]], recomputes_parts: bool
) -> Iterator[dict[str, Any]]:
    """Overrides from the cheapest to the dearest, those of ``smaller`` first."""
    if isinstance(config, SftConfig):
        model, layout = "model", "engine"
        dynamic, limit = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
        ranks = config.engine.ulysses_sequence_parallel_size
    else:
        actor = "actor_rollout_ref.actor"
        model, layout = "actor_rollout_ref.model", f"{actor}.fsdp_config"
        dynamic, limit = f"{actor}.use_dynamic_bsz", f"{actor}.ppo_max_token_len_per_gpu"
        ranks = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    shortest = -(-longest_sequence(config) // ranks)
    enable, granularity = f"{model}.enable_gradient_checkpointing", f"{model}.recompute_granularity"
    recompute = {enable: True, granularity: "full"}
    dearer: list[dict[str, Any]] = [{}]
    yield from smaller
    dearer += smaller[-1:]
    parts = ("pointwise", "feed_forward") if recomputes_parts else ()
    dearer += [{enable: True, granularity: part} for part in parts]
    dearer.append(recompute)
    if config.trainer.num_devices > 1:
        dearer.append(recompute | {f"{layout}.offload_policy": True})
    for extra in dearer:
        budget = max(shortest, training_tokens(config, ranks))
        while budget > shortest:
            yield {dynamic: True, limit: budget} | extra
            budget = max(shortest, budget // 2)
        yield {dynamic: True, limit: shortest} | extra


def _with(config: ConfigT, path: list[str], *, value: Any) -> ConfigT:
    """A copy of ``config`` with one key changed."""
    name, *below = path
    inner = _with(dict(config)[name], below, value=value) if below else value
    return config.model_copy(update={name: inner})
