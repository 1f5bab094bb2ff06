# SPDX-License-Identifier: Apache-2.0
"""The errors about runs that exceed the memory of their devices or hosts, with overrides that make
them fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, combinations
from typing import Any

from tandem.config.derived.microbatches import (
    microbatch_keys,
    training_tokens,
)
from tandem.config.derived.pools import CRITIC, REWARD_MODEL, auxiliary_layouts
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import place, trained_model
from tandem.config.plan.host_memory import HOST_SHARE, fits_host, resting_bytes
from tandem.config.plan.memory import (
    GIB,
    NO_MODELS,
    least_generating,
    plan_memory,
    wanted_cache,
)
from tandem.config.plan.memory_choice import (
    CACHE_SHARE,
    OFFLOAD_COSTS,
    most_bytes,
    smaller_shares,
    with_overrides,
)
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

_ACTOR = "actor_rollout_ref.actor."
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
"""Auxiliary model -> prefix of the policy's keys -> prefix of its own; the first match counts."""


def require_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    available_bytes: int,
    host_bytes: int | None = None,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
    recomputes_parts: bool = True,
) -> None:
    """Raise UserError, with overrides that fit, if a device needs more than ``available_bytes``.

    Args:
        sizes, auxiliary: as in ``plan_memory``.
        host_bytes: the memory of a host, which the overrides fit, too; None if it is not known.
        recomputes_parts: whether the model can recompute parts of layers, not only whole layers.
    """
    plans = plan_memory(config, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    name, plan = max(plans.items(), key=lambda entry: entry[1].total)
    if plan.total <= available_bytes:
        return
    candidates = _candidates(
        config,
        smaller=_smaller_generation(config, sizes, available_bytes=available_bytes),
        recomputes_parts=recomputes_parts,
    )
    remedy = _remedy(
        config,
        sizes,
        candidates=candidates,
        auxiliary=auxiliary,
        available_bytes=available_bytes,
        host_bytes=host_bytes,
    )
    held = plan.critic + plan.weights + plan.gradients + plan.optimizer + plan.gathered
    frozen = plan.reference + plan.reward_model + plan.rollout
    subject = "this run" if config.trainer.num_devices == 1 else f"a device of {name}"
    raise UserError(
        "memory",
        rule=f"{subject} needs about {plan.total / GIB:.0f} GiB (weights, gradients and "
        f"optimizer {held / GIB:.0f}, reference and rollout "
        f"{frozen / GIB:.0f}, cache {plan.cache / GIB:.0f}, activations "
        f"{plan.activations / GIB:.0f}) of {available_bytes / GIB:.0f} GiB",
        remedy=remedy,
    )


def require_host_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    available_bytes: int,
    host_bytes: int,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
) -> None:
    """Raise UserError if weights and optimizer states that rest on a host take too much of it.

    Args:
        sizes, auxiliary, available_bytes: as in ``plan_memory``.
        host_bytes: the memory of a host.
    """
    plan = partial(plan_memory, sizes=sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    plans = plan(config)
    if fits_host(config, plans, host_bytes=host_bytes):
        return
    resting = resting_bytes(config, plans)
    remedy = f"Use a host with {math.ceil(resting / HOST_SHARE / GIB)} GiB, or more nodes."
    for keys in _subsets(_offloads(config)):
        overrides = dict.fromkeys(keys, False)
        changed = with_overrides(config, overrides)
        others = plan(changed)
        is_small = all(own.total <= available_bytes for own in others.values())
        if is_small and fits_host(changed, others, host_bytes=host_bytes):
            remedy = f"Set {_told(overrides)}."
            break
    raise UserError(
        "memory of the host",
        rule=f"what offloading keeps there ({resting / GIB:.0f} GiB) is more than {HOST_SHARE:.0%} "
        f"of its {host_bytes / GIB:.0f} GiB",
        remedy=remedy,
    )


def _subsets(keys: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all sets of some of the keys, the smallest first."""
    return chain.from_iterable(combinations(keys, size) for size in range(1, len(keys) + 1))


def _offloads(config: RunConfig | SftConfig) -> list[str]:
    """Return the offload keys that are on. Some may have no effect in this run."""
    names = ("param_offload", "optimizer_offload", "offload_policy")
    keys = {
        f"{own.section}.{name}": getattr(own.layout, name)
        for own in trained_model(config).of_task.values()
        for name in names
    }
    return [key for key, is_on in keys.items() if is_on]


def require_cache(config: RunConfig, sizes: ModelSizes, *, available_bytes: int) -> None:
    """Raise UserError if the paged cache of a device cannot hold the longest sequence alone."""
    data, share = config.data, config.actor_rollout_ref.rollout.gpu_memory_utilization
    weights, needed = least_generating(config, sizes)
    if int(share * available_bytes) >= weights + needed:
        return
    fitting = math.ceil(100 * (weights + needed) / available_bytes) / 100
    raise UserError(
        CACHE_SHARE,
        share,
        rule=f"of {available_bytes / GIB:.0f} GiB, beside the weights ({weights / GIB:.1f} GiB), "
        "leaves no room for the keys and values of the longest sequence "
        f"({needed / GIB:.1f} GiB: data.max_prompt_length={data.max_prompt_length} + "
        f"data.max_response_length={data.max_response_length} tokens)",
        remedy=f"Set {CACHE_SHARE}={fitting:g}." if fitting <= 1 else "Shorten the sequences.",
    )


def narrow_cache(
    config: RunConfig,
    sizes: ModelSizes,
    *,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
    available_bytes: int,
) -> str | None:
    """Return a sentence if the paged cache of a device cannot hold all sequences of a step at once;
    with the share that could, if the run fits with it.
    """
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    weights, _ = least_generating(config, sizes)
    wanted = wanted_cache(config, sizes, placement=place(config))
    room = int(share * available_bytes) - weights
    if room >= wanted:
        return None
    note = (
        f"{CACHE_SHARE}={share:g} holds the keys and values of {room / wanted:.0%} of the "
        "sequences that a device may generate at once; the others wait for them."
    )
    larger = math.ceil(100 * (weights + wanted) / available_bytes) / 100
    if larger > 1:
        return note
    changed = with_overrides(config, {CACHE_SHARE: larger})
    plans = plan_memory(changed, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    if any(plan.total > most_bytes(config, available_bytes) for plan in plans.values()):
        return note
    return f"{note} Set {CACHE_SHARE}={larger:g} to generate them together."


def _remedy(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    candidates: Iterable[Mapping[str, Any]],
    auxiliary: Mapping[str, ModelSizes],
    available_bytes: int,
    host_bytes: int | None,
) -> str:
    """Return the first candidate that makes the run fit, as a sentence, or what else would."""
    needs_host: tuple[str, float] | None = None
    for candidate in candidates:
        overrides = _for_all(config, candidate)
        changed = with_overrides(config, overrides)
        plans = plan_memory(changed, sizes, auxiliary=auxiliary, available_bytes=available_bytes)
        if any(plan.total > available_bytes for plan in plans.values()):
            continue
        keys = _told(overrides)
        if fits_host(changed, plans, host_bytes=host_bytes):
            return f"Set {keys}."
        needs_host = needs_host or (keys, resting_bytes(changed, plans) / HOST_SHARE / GIB)
    if needs_host is None or host_bytes is None:
        return "Use a smaller model, more devices or devices with more memory."
    keys, needed = needs_host
    return (
        f"On a host with {math.ceil(needed)} GiB, set {keys}. This host has "
        f"{host_bytes / GIB:.0f} GiB."
    )


def _told(overrides: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in overrides.items())


def _for_all(config: RunConfig | SftConfig, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``overrides`` of the policy, and the same settings of the auxiliary models."""
    if isinstance(config, SftConfig):
        return overrides
    settings = dict(overrides)
    for name in auxiliary_layouts(config):
        for key, value in overrides.items():
            fitting = [section for section in _ALSO_SET[name] if key.startswith(section)]
            for section in fitting[:1]:
                settings[_ALSO_SET[name][section] + key.removeprefix(section)] = value
    return settings


def _smaller_generation(
    config: RunConfig | SftConfig, sizes: ModelSizes, *, available_bytes: int
) -> list[dict[str, Any]]:
    """Return overrides that reduce the memory of generation, the smallest result last."""
    if isinstance(config, SftConfig):
        return []
    if config.trainer.max_lag == 0:
        several = config.trainer.num_devices > 1
        return [{"actor_rollout_ref.rollout.free_cache_engine": True}] if several else []
    shares = smaller_shares(config, sizes, available_bytes=available_bytes)
    return [{CACHE_SHARE: share} for share in shares]


def _candidates(
    config: RunConfig | SftConfig, *, smaller: Sequence[dict[str, Any]], recomputes_parts: bool
) -> Iterator[dict[str, Any]]:
    """Yield overrides from the cheapest to the most expensive, those of ``smaller`` first."""
    trained = trained_model(config)
    own = trained.of_task["actor-train"]
    model, layout = trained.key.removesuffix(".path"), own.section
    ranks = own.layout.ulysses_sequence_parallel_size
    shortest = -(-trained.max_tokens // ranks)
    enable, granularity = f"{model}.enable_gradient_checkpointing", f"{model}.recompute_granularity"
    recompute = {enable: True, granularity: "full"}
    extras: list[dict[str, Any]] = [{}]
    yield from smaller
    extras += smaller[-1:]
    parts = ("pointwise", "feed_forward") if recomputes_parts else ()
    extras += [{enable: True, granularity: part} for part in parts]
    extras.append(recompute)
    if config.trainer.num_devices > 1:
        extras.append(recompute | {f"{layout}.offload_policy": True})
    else:
        offloads = {f"{layout}.{name}": True for name in OFFLOAD_COSTS}
        extras += [offloads, recompute | offloads]
    keys = microbatch_keys(config, "actor-train")
    for extra in extras:
        budget = max(shortest, training_tokens(config, "actor-train", ranks=ranks))
        while budget > shortest:
            yield {keys.dynamic: True, keys.tokens: budget} | extra
            budget = max(shortest, budget // 2)
        yield {keys.dynamic: True, keys.tokens: shortest} | extra
