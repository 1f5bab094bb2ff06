# SPDX-License-Identifier: Apache-2.0
"""The memory keys that a run sets itself: recomputation and micro-batches, and on one device
offloading and the share of the device for generation.

Only keys that the user has left alone are chosen, and only such as change no result but rounding.
Of the settings that fit, by the plan of the memory, the one with the least predicted cost is taken.
The share for generation is lowered only if the run would be refused otherwise. The choice depends
on the total memory of the device and its host, not on how much is free, so that a run can be
repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, TypeVar

from pydantic import BaseModel

from tandem.config.derived.microbatches import limits, microbatch_keys
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import place, trained_model
from tandem.config.plan.host_memory import fits_host
from tandem.config.plan.memory import NO_MODELS, least_generating, plan_memory
from tandem.config.schema.rollout import NATIVE_NAMES
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

RECOMPUTE_COSTS = {None: 0.0, "pointwise": 0.05, "feed_forward": 0.13, "full": 0.18}
"""The part that is recomputed -> the time that it adds to an update (docs/performance.md)."""
HALVING_COST = 0.02
"""The time that half as large micro-batches add to an update; it is chosen, not measured."""
WHOLE_GROUPS = 1.125
"""Micro-batches may be so many times larger, if whole groups of the greatest length then fill them.

A group of samples shares its prompt, and stays in one micro-batch where it fits.
"""
LEAST_TOKENS = 8192
"""No smaller size of micro-batches is chosen, because kernels would not fill a device."""
SHARE = 0.92
"""The share of the device's memory that a choice may plan on one device.

With the native engine, peaks of tensors were 6 to 26 % below their plans
(``benchmarks/planned_memory.py``). The rest is for pieces of memory that are too small to be used
again, and for communication.
"""
SHARE_OF_SEVERAL = 0.85
"""Likewise on several devices. There a run ends when memory runs out; on one device, micro-batches
shrink."""
OFFLOAD_COSTS = {"param_offload": 13e3, "optimizer_offload": 27e3}
"""The key -> the tokens whose update takes as long as its copies.

A parameter takes 6 operations a token, at 500 TFLOP/s, and 8 or 16 bytes a step at 50 GB/s.
"""

CACHE_SHARE = "actor_rollout_ref.rollout.gpu_memory_utilization"
_SHARES = (0.4, 0.3, 0.2)

ConfigT = TypeVar("ConfigT", bound=RunConfig | SftConfig)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Overrides, and their predicted cost as a share of an update."""

    overrides: Mapping[str, Any]
    cost: float


def choose_memory(
    config: ConfigT,
    sizes: ModelSizes,
    *,
    available_bytes: int,
    host_bytes: int | None = None,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
    recomputes_parts: bool = True,
    has_own_kernels: bool = True,
) -> tuple[ConfigT, Mapping[str, Any]]:
    """Return the configuration with memory keys for devices of this size, and these keys.

    It is ``config`` itself, with no keys, if nothing is to be chosen or nothing fits.

    Args:
        sizes, auxiliary: as in ``plan_memory``.
        host_bytes: the memory of a host; None if it is not known.
        recomputes_parts: whether the model can recompute parts of layers, not only whole layers.
        has_own_kernels: whether tandem's kernels compute the model. Plans are of their activations,
            so that nothing is chosen for several devices without them.
    """
    placement = place(config)
    is_one, trainer = placement.is_one_process, placement.pool_of("actor-train").name
    if not (is_one or has_own_kernels):
        return config, {}
    most = most_bytes(config, available_bytes)
    plan = partial(plan_memory, sizes=sizes, auxiliary=auxiliary, available_bytes=available_bytes)
    unchanged = plan(config)
    candidates = sorted(
        _candidates(config, sizes, recomputes_parts=recomputes_parts), key=lambda one: one.cost
    )
    less: list[Mapping[str, Any]] = [{}]
    if has_own_kernels and any(own.total > available_bytes for own in unchanged.values()):
        less += _less_generation(config, sizes, available_bytes=available_bytes)
    for own_share, candidate in product(less, candidates):
        overrides = {**candidate.overrides, **own_share}
        changed = with_overrides(config, overrides)
        plans = plan(changed)
        # Pools that these keys do not concern, such as one that only generates, are left out.
        concerned = (
            own for name, own in plans.items() if name == trainer or own != unchanged[name]
        )
        is_small = all(own.total <= most for own in concerned)
        if is_small and fits_host(changed, plans, host_bytes=host_bytes):
            chosen = _changes(config, overrides)
            return (changed if chosen else config), chosen
    return config, {}


def with_overrides(config: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
    """Return a copy of ``config`` with some keys changed."""
    for key, value in overrides.items():
        config = _with_key(config, key.split("."), value=value)
    return config


def _with_key(config: Any, path: list[str], *, value: Any) -> Any:
    name, *below = path
    inner = _with_key(dict(config)[name], below, value=value) if below else value
    return config.model_copy(update={name: inner})


def smaller_shares(
    config: RunConfig, sizes: ModelSizes, *, available_bytes: int
) -> tuple[float, ...]:
    """Return shares of a device for generation below the configured one, the largest first.

    Each has room for the weights and the longest sequence.
    """
    least = sum(least_generating(config, sizes)) / available_bytes
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    return tuple(lower for lower in _SHARES if least < lower < share)


def most_bytes(config: RunConfig | SftConfig, available_bytes: int) -> int:
    """Return the memory that a choice may plan."""
    share = SHARE if place(config).is_one_process else SHARE_OF_SEVERAL
    return int(share * available_bytes)


def _less_generation(
    config: RunConfig | SftConfig, sizes: ModelSizes, *, available_bytes: int
) -> list[Mapping[str, Any]]:
    """Return smaller shares for generation, if one device trains and generates in turns with the
    native engine, and the user has left the share alone.
    """
    if isinstance(config, SftConfig) or not place(config).is_one_process:
        return []
    is_native = config.actor_rollout_ref.rollout.name in NATIVE_NAMES
    if not is_native or _is_set(config, CACHE_SHARE):
        return []
    shares = smaller_shares(config, sizes, available_bytes=available_bytes)
    return [{CACHE_SHARE: share} for share in shares]


def _candidates(
    config: RunConfig | SftConfig, sizes: ModelSizes, *, recomputes_parts: bool
) -> Iterator[_Candidate]:
    is_one = place(config).is_one_process
    trained = trained_model(config)
    own = trained.of_task["actor-train"]
    model = trained.key.removesuffix(".path")
    tokens = _tokens_of_update(config)
    recomputations = list(_recomputations(config, model, recomputes_parts=recomputes_parts))
    if not is_one and sizes.tower and not trained.freezes_tower and trained.adapters is None:
        # The plan has no activations of a tower, which any recomputation computes again.
        enable = f"{model}.enable_gradient_checkpointing"
        recomputations = [way for way in recomputations if way.overrides.get(enable, True)]
    ways = product(
        recomputations,
        _budgets(config),
        _offloads(config, own.section) if is_one else ({},),
    )
    for recomputation, budget, offload in ways:
        copied = sum(OFFLOAD_COSTS[key.rpartition(".")[2]] for key in offload if offload[key])
        yield _Candidate(
            {**recomputation.overrides, **budget.overrides, **offload},
            recomputation.cost + budget.cost + copied / tokens,
        )


def _recomputations(
    config: RunConfig | SftConfig, section: str, *, recomputes_parts: bool
) -> Iterator[_Candidate]:
    enable, granularity = (
        f"{section}.{name}" for name in ("enable_gradient_checkpointing", "recompute_granularity")
    )
    if _is_set(config, enable) or _is_set(config, granularity):
        yield _Candidate({}, 0.0)
        return
    for part, cost in RECOMPUTE_COSTS.items():
        if part is None:
            yield _Candidate({enable: False}, cost)
        elif recomputes_parts or part == "full":
            yield _Candidate({enable: True, granularity: part}, cost)


def _budgets(config: RunConfig | SftConfig) -> Iterator[_Candidate]:
    """Yield smaller micro-batches that are filled by tokens, unless their size is the user's."""
    keys = microbatch_keys(config, "actor-train")
    yield _Candidate({}, 0.0)
    largest = limits(config, "actor-train").max_tokens
    if largest is None or _is_set(config, keys.tokens):
        return
    tokens, cost = largest // 2, HALVING_COST
    trained = trained_model(config)
    ranks = trained.of_task["actor-train"].layout.ulysses_sequence_parallel_size
    shortest = max(LEAST_TOKENS, -(-trained.max_tokens // ranks))
    while tokens >= shortest:
        whole = _for_whole_groups(config, tokens, ranks=ranks)
        yield _Candidate({keys.tokens: whole}, cost)
        if whole != tokens:  # which may fit where the other does not
            yield _Candidate({keys.tokens: tokens}, cost + HALVING_COST / 2)
        tokens, cost = tokens // 2, cost + HALVING_COST


def _for_whole_groups(config: RunConfig | SftConfig, tokens: int, *, ranks: int) -> int:
    """Return ``tokens``, or a little more if whole groups of samples then fill micro-batches.

    Args:
        ranks: the number of devices that share a sequence.
    """
    if isinstance(config, SftConfig):
        return tokens
    samples = config.actor_rollout_ref.rollout.n * config.data.max_response_length
    group = -(-(config.data.max_prompt_length + samples) // ranks)
    larger = -(-tokens // group) * group
    return larger if larger <= WHOLE_GROUPS * tokens else tokens


def _offloads(config: RunConfig | SftConfig, section: str) -> Iterator[Mapping[str, bool]]:
    keys = [key for name in OFFLOAD_COSTS if not _is_set(config, key := f"{section}.{name}")]
    for chosen in product((False, True), repeat=len(keys)):
        yield {key: True for key, value in zip(keys, chosen, strict=True) if value}


def _tokens_of_update(config: RunConfig | SftConfig) -> int:
    """Return the tokens of an optimizer step, each sequence at its greatest length."""
    longest = trained_model(config).max_tokens
    if isinstance(config, SftConfig):
        return config.data.train_batch_size * longest
    roles = config.actor_rollout_ref
    return roles.actor.ppo_mini_batch_size * roles.rollout.n * longest


def _value(config: RunConfig | SftConfig, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = dict(value)[name]
    return value


def _is_set(config: RunConfig | SftConfig, key: str) -> bool:
    """Return whether the user has set a key."""
    section, _, name = key.rpartition(".")
    parent: BaseModel = _value(config, section)
    return name in parent.model_fields_set


def _changes(config: RunConfig | SftConfig, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overrides that differ from the configuration."""
    return {key: value for key, value in overrides.items() if _value(config, key) != value}
