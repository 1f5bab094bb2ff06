# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the memory of each accelerator, from the configuration and the model's sizes.

An estimate of the largest parts of one device of each pool; libraries' work space and the
allocator's gaps are an allowance on top. On CPUs nothing is checked: memory there is virtual and
swapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel

from tandem.config.layout import FsdpConfig
from tandem.config.model import RecomputeGranularity
from tandem.config.pools import Placement, Pool, RankLayout, place_run, place_sft, scorer_of
from tandem.config.run import RunConfig
from tandem.config.sft import SftConfig
from tandem.config.sizes import ModelSizes
from tandem.errors import UserError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

GIB = 1 << 30
LOGITS_BYTES = 3 * GIB
"""A chunk of fp32 logits and its gradient in half precision (``models.kernels.logprob``)."""
ALLOWANCE = 1.1
"""For work space and gaps; chosen, not measured."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device at the same time.

    Attributes:
        weights: this device's shard; in a run of one process also, if it is another precision,
            what is computed with. Of the former, with ``param_offload``, only what does not fit
            where activations have been.
        gradients: likewise.
        optimizer: two moments a weight, in their own precision; with ``optimizer_offload`` only
            what does not fit there either.
        gathered: layers that are whole for a moment, with their gradients.
        reference: this device's shard of a frozen copy, 0 without one.
        rollout: the weights that generate, and the copy in which new ones arrive if it is on the
            device; 0 where those in training generate. With ``free_cache_engine``, where several
            devices train and generate in turns, only what does not fit where training has been.
        cache: keys and values of all sequences that run together; likewise.
        activations: of the largest micro-batch.
        logits: of a chunk of response tokens.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    reference: int = 0
    rollout: int = 0
    cache: int = 0
    activations: int = 0
    logits: int = 0

    @property
    def total(self) -> int:
        """The sum with its allowance."""
        return int(sum(asdict(self).values()) * ALLOWANCE)

    def to_gib(self) -> dict[str, float]:
        """For people: GiB, rounded."""
        parts = {**asdict(self), "total": self.total}
        return {name: round(value / GIB, 2) for name, value in parts.items()}


@dataclass(frozen=True, slots=True)
class _Model:
    """Weights as a task holds them: how they are laid out, and over which ranks."""

    sizes: ModelSizes
    config: FsdpConfig
    ranks: RankLayout

    @property
    def stored(self) -> int:
        return _BYTES[self.config.model_dtype]

    @property
    def computed(self) -> int:
        return _BYTES[self.config.dtype]

    @property
    def held_parameters(self) -> int:
        """On one device between passes."""
        return self.sizes.num_parameters // (self.ranks.tensor_parallel * self.ranks.num_shards)

    @property
    def held_frozen(self) -> int:
        """Bytes of weights that only score."""
        rests = self.config.param_offload or self.config.offload_policy
        return 0 if rests else self.computed * self.held_parameters

    @property
    def visiting(self) -> int:
        """Bytes of what is whole at a time: embedding, head and two layers, one of which is
        computed with while the next one comes in."""
        parameters = self.sizes.embedding_parameters + 2 * self.sizes.layer_parameters
        return self.computed * parameters // self.ranks.tensor_parallel

    @property
    def gathered_frozen(self) -> int:
        """Bytes that a forward pass gathers: none if they are held as they are computed with."""
        is_held = self.ranks.num_shards == 1 and self.held_frozen > 0
        return 0 if is_held else self.visiting

    @property
    def gathered_in_training(self) -> int:
        """What is whole at a time, and the largest gradient in both precisions it is summed in.

        Without ``reshard_after_forward`` everything, and all gradients in fp32.
        """
        split = self.ranks.tensor_parallel
        largest = max(self.sizes.embedding_parameters, self.sizes.layer_parameters) // split
        if self.config.reshard_after_forward:
            return self.visiting + (self.computed + self.stored) * largest
        summed = (self.computed + _BYTES["float32"]) * self.sizes.num_parameters // split
        return summed + self.computed * largest


def plan_memory(
    config: RunConfig | SftConfig, sizes: ModelSizes, *, available_bytes: int | None = None
) -> Mapping[str, MemoryPlan]:
    """What one device of each pool holds, by the pool's name, if it is an accelerator.

    Args:
        available_bytes: the device's memory, of which ``rollout.gpu_memory_utilization`` bounds
            weights and cache; None if no device is known.
    """
    if isinstance(config, SftConfig):
        placement = place_sft(config)
        model = _Model(sizes, config.engine, placement.layouts["actor-train"])
        return {
            placement.pools[0].name: _trained(
                MemoryPlan(), model, config=config, placement=placement
            )
        }
    placement = place_run(config)
    return {
        pool.name: _of_pool(
            pool, config, sizes=sizes, placement=placement, available_bytes=available_bytes
        )
        for pool in placement.used_pools
    }


def require_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    available_bytes: int,
    recomputes_parts: bool = True,
) -> None:
    """Raise UserError, with an override that fits, if a device of the run needs more than
    ``available_bytes``. ``recomputes_parts``: of layers, as the model can; else whole ones."""
    plans = plan_memory(config, sizes, available_bytes=available_bytes)
    name, plan = max(plans.items(), key=lambda entry: entry[1].total)
    if plan.total <= available_bytes:
        return
    candidates = _candidates(config, recomputes_parts=recomputes_parts)
    remedy = _remedy(config, sizes, candidates=candidates, available_bytes=available_bytes)
    held = plan.weights + plan.gradients + plan.optimizer + plan.gathered
    whose = "this run" if config.trainer.num_devices == 1 else f"a device of {name}"
    raise UserError(
        f"memory: {whose} needs about {plan.total / GIB:.0f} GiB (weights, gradients and "
        f"optimizer {held / GIB:.0f}, reference and rollout "
        f"{(plan.reference + plan.rollout) / GIB:.0f}, cache {plan.cache / GIB:.0f}, activations "
        f"{plan.activations / GIB:.0f}) of {available_bytes / GIB:.0f} GiB. {remedy}"
    )


def _of_pool(
    pool: Pool,
    config: RunConfig,
    *,
    sizes: ModelSizes,
    placement: Placement,
    available_bytes: int | None,
) -> MemoryPlan:
    roles, layouts = config.actor_rollout_ref, placement.layouts
    plan = MemoryPlan()
    if "generate" in pool.tasks:
        plan = _generating(config, sizes, placement=placement, available_bytes=available_bytes)
    if "ref_logp" in pool.tasks:
        model = _Model(sizes, roles.ref.fsdp_config, layouts["ref_logp"])
        plan = _scoring(plan, model, config=config, placement=placement)
        plan = replace(plan, reference=_frozen(model, placement))
    scorer = scorer_of(pool)
    if scorer in ("generate", "logp"):
        model = _Model(sizes, roles.actor.fsdp_config, layouts["logp"])
        plan = _scoring(plan, model, config=config, placement=placement)
        copies = _device_copies(config, placement)
        plan = replace(plan, weights=copies * _frozen(model, placement) if scorer == "logp" else 0)
    if "actor-train" in pool.tasks:
        model = _Model(sizes, roles.actor.fsdp_config, layouts["actor-train"])
        plan = _trained(plan, model, config=config, placement=placement)
        if roles.rollout.free_cache_engine and not placement.is_one_process:
            plan = _taking_turns(plan)
    return plan


def _taking_turns(plan: MemoryPlan) -> MemoryPlan:
    """Generation takes nothing while the device trains: what counts is what it takes more."""
    room = plan.gradients + plan.gathered + plan.activations + plan.logits
    left = max(0, room - plan.rollout)
    return replace(plan, rollout=max(0, plan.rollout - room), cache=max(0, plan.cache - left))


def _generating(
    config: RunConfig, sizes: ModelSizes, *, placement: Placement, available_bytes: int | None
) -> MemoryPlan:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    computed = _BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    prompts = -(-data.train_batch_size // placement.layouts["generate"].num_ranks)
    running = min(rollout.max_num_seqs, prompts * rollout.n)
    prompts = -(-running // rollout.n)
    tokens = prompts * data.max_prompt_length + running * data.max_response_length
    cache = computed * sizes.cache_numbers_per_token * tokens
    weights = computed * sizes.num_parameters
    if available_bytes is not None:
        share = rollout.gpu_memory_utilization
        cache = min(cache, max(0, int(share * available_bytes) - weights))
    weights *= _device_copies(config, placement)
    return MemoryPlan(rollout=0 if placement.is_one_process else weights, cache=cache)


def _device_copies(config: RunConfig, placement: Placement) -> int:
    """Of weights that come through the link."""
    rollout = config.actor_rollout_ref.rollout
    has_second = rollout.enable_dual_buffer and not rollout.enable_param_async
    return 2 if has_second and placement.generates_apart else 1


def _scoring(
    plan: MemoryPlan, model: _Model, *, config: RunConfig, placement: Placement
) -> MemoryPlan:
    """With the forward passes of a frozen model: one layer's activations at a time."""
    tokens = _microbatch_tokens(config, model.ranks.sequence_parallel)
    kept = model.computed * tokens
    kept *= model.sizes.layer_numbers_per_token(model.ranks.tensor_parallel)
    return replace(
        plan,
        gathered=0 if placement.is_one_process else max(plan.gathered, model.gathered_frozen),
        activations=max(plan.activations, kept),
        logits=LOGITS_BYTES,
    )


def _frozen(model: _Model, placement: Placement) -> int:
    if placement.is_one_process:
        # While it scores there are no gradients of training, which are larger.
        return 0 if model.config.param_offload else model.computed * model.sizes.num_parameters
    return model.held_frozen


def _trained(
    plan: MemoryPlan, model: _Model, *, config: RunConfig | SftConfig, placement: Placement
) -> MemoryPlan:
    """With training; what can rest elsewhere takes the room that something else leaves."""
    numbers = model.sizes.kept_numbers_per_token(
        _recomputed(config), tensor_parallel=model.ranks.tensor_parallel
    )
    tokens = _microbatch_tokens(config, model.ranks.sequence_parallel)
    activations = max(plan.activations, model.computed * tokens * numbers)
    optim = config.optim if isinstance(config, SftConfig) else config.actor_rollout_ref.actor.optim
    moment = model.stored if optim.moments_dtype == "auto" else _BYTES[optim.moments_dtype]
    optimizer = 2 * moment * model.held_parameters
    plan = replace(plan, activations=activations, logits=LOGITS_BYTES)
    room = activations + LOGITS_BYTES  # while the optimizer steps
    if placement.is_one_process:
        kept, computed = (x * model.sizes.num_parameters for x in (model.stored, model.computed))
        held = kept if kept == computed else kept + computed
        visits = model.config.param_offload and kept != computed
        visiting = min(kept, room) if visits else 0
        plan = replace(plan, weights=held - visiting, gradients=held)
        room -= visiting
    if model.config.optimizer_offload:
        optimizer = max(0, optimizer - room)
    plan = replace(plan, optimizer=optimizer)
    if placement.is_one_process:
        return plan
    plan = replace(plan, gathered=max(plan.gathered, model.gathered_in_training))
    held = model.stored * model.held_parameters
    if model.config.offload_policy:
        return replace(plan, optimizer=0)
    return replace(plan, weights=held, gradients=held)


def _remedy(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    candidates: Iterable[Mapping[str, Any]],
    available_bytes: int,
) -> str:
    """The first overrides that make it fit."""
    for overrides in candidates:
        changed = config
        for key, value in overrides.items():
            changed = _with(changed, key.split("."), value=value)
        plans = plan_memory(changed, sizes, available_bytes=available_bytes)
        if all(plan.total <= available_bytes for plan in plans.values()):
            return f"Set {' '.join(f'{key}={value}' for key, value in overrides.items())}."
    return "Use a smaller model, more devices or devices with more memory."


def _candidates(
    config: RunConfig | SftConfig, *, recomputes_parts: bool
) -> Iterator[dict[str, Any]]:
    """Overrides from the cheapest to the dearest."""
    if isinstance(config, SftConfig):
        model, layout = "model", "engine"
        dynamic, limit = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
        ranks = config.engine.ulysses_sequence_parallel_size
    else:
        actor = "actor_rollout_ref.actor"
        model, layout = "actor_rollout_ref.model", f"{actor}.fsdp_config"
        dynamic, limit = f"{actor}.use_dynamic_bsz", f"{actor}.ppo_max_token_len_per_gpu"
        ranks = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    shortest = -(-_longest(config) // ranks)
    enable, granularity = f"{model}.enable_gradient_checkpointing", f"{model}.recompute_granularity"
    recompute = {enable: True, granularity: "full"}
    dearer: list[dict[str, Any]] = [{}]
    if isinstance(config, RunConfig) and config.trainer.num_devices > 1:
        freed = {"actor_rollout_ref.rollout.free_cache_engine": True}
        yield freed
        dearer.append(freed)
    parts = ("pointwise", "feed_forward") if recomputes_parts else ()
    dearer += [{enable: True, granularity: part} for part in parts]
    dearer.append(recompute)
    if config.trainer.num_devices > 1:
        dearer.append(recompute | {f"{layout}.offload_policy": True})
    for extra in dearer:
        budget = max(shortest, _microbatch_tokens(config, ranks))
        while budget > shortest:
            yield {dynamic: True, limit: budget} | extra
            budget = max(shortest, budget // 2)
        yield {dynamic: True, limit: shortest} | extra


def _with(config: ConfigT, path: list[str], *, value: Any) -> ConfigT:
    """A copy of ``config`` with one key changed."""
    name, *below = path
    inner = _with(dict(config)[name], below, value=value) if below else value
    return config.model_copy(update={name: inner})


def _recomputed(config: RunConfig | SftConfig) -> RecomputeGranularity | None:
    """None if nothing is."""
    model = config.model if isinstance(config, SftConfig) else config.actor_rollout_ref.model
    return model.recompute_granularity if model.enable_gradient_checkpointing else None


def _microbatch_tokens(config: RunConfig | SftConfig, ranks: int) -> int:
    """Tokens of one of the ``ranks`` that share the largest micro-batch in training."""
    if isinstance(config, SftConfig):
        limit, count = config.data.microbatch_tokens, config.data.micro_batch_size_per_gpu
    else:
        actor = config.actor_rollout_ref.actor
        limit, count = actor.microbatch_tokens, actor.ppo_micro_batch_size_per_gpu
    return -(-(count or 1) * _longest(config) // ranks) if limit is None else limit


def _longest(config: RunConfig | SftConfig) -> int:
    """Tokens of the longest sequence that can be."""
    if isinstance(config, SftConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length
