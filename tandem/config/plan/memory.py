# SPDX-License-Identifier: Apache-2.0
"""What a run needs of the memory of each accelerator, from the configuration and the model's sizes.

An estimate of the largest parts of one device of each pool; libraries' work space and the
allocator's gaps are an allowance on top. On CPUs nothing is checked: memory there is virtual and
swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tandem.config.derived.pools import (
    CRITIC,
    REWARD_MODEL,
    Placement,
    Pool,
    RankLayout,
    place_run,
    place_sft,
    scorer_of,
)
from tandem.config.derived.sizes import ModelSizes
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig, RecomputeGranularity
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

GIB = 1 << 30
LOGITS_BYTES = 3 * GIB
"""A chunk of fp32 logits and its gradient in half precision (``models.kernels.logprob``)."""
ALLOWANCE = 1.1
"""For work space and gaps; chosen, not measured."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
"""Of a number, by the name of its precision; what ``auto`` is on accelerators."""
NONE_BESIDE: Mapping[str, ModelSizes] = {}


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
        reference: this device's shard of a frozen copy, 0 without one; ``reward_model`` likewise.
        critic: its weights and optimizer, 0 without one. Its gradients and the policy's are not
            there at the same time: those above are the larger ones.
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
    critic: int = 0
    reward_model: int = 0
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
        return BYTES[self.config.model_dtype]

    @property
    def computed(self) -> int:
        return BYTES[self.config.dtype]

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
        summed = (self.computed + BYTES["float32"]) * self.sizes.num_parameters // split
        return summed + self.computed * largest


@dataclass(frozen=True, slots=True)
class _Training:
    """A model in training, with ``tokens`` of the largest micro-batch on a device."""

    model: _Model
    optim: OptimConfig
    recomputed: RecomputeGranularity | None
    tokens: int


def plan_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    beside: Mapping[str, ModelSizes] = NONE_BESIDE,
    available_bytes: int | None = None,
) -> Mapping[str, MemoryPlan]:
    """What one device of each pool holds, by the pool's name, if it is an accelerator.

    Args:
        beside: sizes of ``CRITIC`` and ``REWARD_MODEL``; those of the policy if they are not known.
        available_bytes: the device's memory, of which ``rollout.gpu_memory_utilization`` bounds
            weights and cache; None if no device is known.
    """
    if isinstance(config, SftConfig):
        placement = place_sft(config)
        model = _Model(sizes, config.engine, placement.layouts["actor-train"])
        training = _policy_training(config, model)
        return {placement.pools[0].name: _trained(MemoryPlan(), training, placement=placement)}
    placement = place_run(config)
    plans = {
        pool.name: _of_pool(
            pool, config, sizes=sizes, placement=placement, available_bytes=available_bytes
        )
        for pool in placement.used_pools
    }
    name = placement.pool_of("actor-train").name
    # A value head is one row: there is no second matrix of the vocabulary's size.
    own = {task: replace(beside.get(task, sizes), tied=True) for task in (CRITIC, REWARD_MODEL)}
    if CRITIC in placement.layouts:
        plans[name] = _with_critic(plans[name], config, sizes=own[CRITIC], placement=placement)
    if REWARD_MODEL in placement.layouts:
        layout, ranks = config.reward_model.model.fsdp_config, placement.layouts[REWARD_MODEL]
        model = _Model(own[REWARD_MODEL], layout, ranks)
        plan = _scoring(plans[name], model, tokens=_scored(config, ranks), placement=placement)
        plans[name] = replace(plan, reward_model=_frozen(model, placement))
    return plans


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
        tokens = training_tokens(config, model.ranks.sequence_parallel)
        plan = _scoring(plan, model, tokens=tokens, placement=placement)
        plan = replace(plan, reference=_frozen(model, placement))
    scorer = scorer_of(pool)
    if scorer in ("generate", "logp"):
        model = _Model(sizes, roles.actor.fsdp_config, layouts["logp"])
        tokens = training_tokens(config, model.ranks.sequence_parallel)
        plan = _scoring(plan, model, tokens=tokens, placement=placement)
        copies = _device_copies(config, placement)
        plan = replace(plan, weights=copies * _frozen(model, placement) if scorer == "logp" else 0)
    if "actor-train" in pool.tasks:
        model = _Model(sizes, roles.actor.fsdp_config, layouts["actor-train"])
        plan = _trained(plan, _policy_training(config, model), placement=placement)
        if config.frees_cache and not placement.is_one_process:
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
    computed = BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    num_begun = data.train_batch_size * (config.trainer.max_lag + 1)
    prompts = -(-num_begun // placement.layouts["generate"].num_ranks)
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


def _scoring(plan: MemoryPlan, model: _Model, *, tokens: int, placement: Placement) -> MemoryPlan:
    """With the forward passes of a frozen model: one layer's activations at a time."""
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


def _policy_training(config: RunConfig | SftConfig, model: _Model) -> _Training:
    is_sft = isinstance(config, SftConfig)
    return _Training(
        model,
        config.optim if is_sft else config.actor_rollout_ref.actor.optim,
        _recomputed(config.model if is_sft else config.actor_rollout_ref.model),
        training_tokens(config, model.ranks.sequence_parallel),
    )


def _with_critic(
    plan: MemoryPlan, config: RunConfig, *, sizes: ModelSizes, placement: Placement
) -> MemoryPlan:
    """With a second model in training, whose updates take turns with the policy's."""
    critic, ranks = config.critic, placement.layouts[CRITIC]
    model = _Model(sizes, critic.model.fsdp_config, ranks)
    tokens = critic.microbatch_tokens or _counted(
        config, critic.ppo_micro_batch_size_per_gpu, ranks=ranks.sequence_parallel
    )
    training = _Training(model, critic.optim, _recomputed(critic.model), tokens)
    own = _trained(MemoryPlan(), training, placement=placement)
    return replace(
        plan,
        critic=own.weights + own.optimizer,
        gradients=max(plan.gradients, own.gradients),
        gathered=max(plan.gathered, own.gathered),
        activations=max(plan.activations, own.activations),
    )


def _trained(plan: MemoryPlan, training: _Training, *, placement: Placement) -> MemoryPlan:
    """With training; what can rest elsewhere takes the room that something else leaves."""
    model, optim = training.model, training.optim
    numbers = model.sizes.kept_numbers_per_token(
        training.recomputed, tensor_parallel=model.ranks.tensor_parallel
    )
    activations = max(plan.activations, model.computed * training.tokens * numbers)
    moment = model.stored if optim.moments_dtype == "auto" else BYTES[optim.moments_dtype]
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


def _recomputed(model: ModelConfig) -> RecomputeGranularity | None:
    """None if nothing is."""
    return model.recompute_granularity if model.enable_gradient_checkpointing else None


def training_tokens(config: RunConfig | SftConfig, ranks: int) -> int:
    """Tokens of one of the ``ranks`` that share the largest micro-batch in training."""
    if isinstance(config, SftConfig):
        limit, count = config.data.microbatch_tokens, config.data.micro_batch_size_per_gpu
    else:
        actor = config.actor_rollout_ref.actor
        limit, count = actor.microbatch_tokens, actor.ppo_micro_batch_size_per_gpu
    return limit or _counted(config, count, ranks=ranks)


def _scored(config: RunConfig, layout: RankLayout) -> int:
    """Tokens on a device of the reward model's largest micro-batch."""
    model, ranks = config.reward_model, layout.sequence_parallel
    return model.microbatch_tokens or _counted(config, model.micro_batch_size_per_gpu, ranks=ranks)


def _counted(config: RunConfig | SftConfig, count: int | None, *, ranks: int) -> int:
    """Tokens of one of the ``ranks`` that share a micro-batch of ``count`` sequences."""
    return -(-(count or 1) * longest_sequence(config) // ranks)


def longest_sequence(config: RunConfig | SftConfig) -> int:
    """Tokens of the longest sequence that can be."""
    if isinstance(config, SftConfig):
        return config.data.max_length
    return config.data.max_prompt_length + config.data.max_response_length
