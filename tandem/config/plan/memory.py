# SPDX-License-Identifier: Apache-2.0
"""An estimate of the memory that a run needs on one accelerator of each pool.

It adds up the largest parts, and an allowance for the workspaces of libraries and fragmentation.
Of the memory of hosts, only what rests there for devices is estimated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tandem.config.derived.microbatches import training_tokens
from tandem.config.derived.pools import (
    REWARD_MODEL,
    Placement,
    Pool,
    RankLayout,
    auxiliary_layouts,
    reference_of,
    scorer_of,
)
from tandem.config.derived.sizes import CACHE_PAGE_TOKENS, ModelSizes
from tandem.config.derived.trained_model import place, trained_model
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig, RecomputeGranularity
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

GIB = 1 << 30
LOGITS_BYTES = 3 * GIB
"""The size of a chunk of fp32 logits and its half-precision gradient (``models.kernels.logprob``).
"""
ALLOWANCE = 1.1
"""The factor for workspaces and fragmentation; it is chosen, not measured."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
"""The size of a number by the name of its precision; ``auto`` as on accelerators."""
NO_MODELS: Mapping[str, ModelSizes] = {}


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes that are on one device at the same time, by their use.

    Attributes:
        weights: the shard of the trained weights. A run of one process also holds a copy in the
            precision of the passes, if that differs. With ``param_offload``, the part of the stored
            weights that visits the device counts only as far as it exceeds the space of activations
            and logits. With adapters: their fp32 values and copies, and the shard of their base.
        gradients: the shard of the gradients. In a run of one process, their sums and, if passes
            have a precision of their own, an upper bound of the gradients in it: those of a layer
            and of the embedding.
        optimizer: two moments per weight, in their own precision. With ``optimizer_offload``, the
            part that visits counts only as far as it exceeds the remaining space of activations and
            logits. With Muon, all visit at once.
        gathered: the layers that are gathered at the same time, with their gradients.
        reference, reward_model: the shards of these frozen models, 0 without them. The reference of
            adapters shares the base on the devices that train or generate.
        critic: its weights and optimizer state, 0 without a critic. Its gradients and those of the
            policy do not exist at the same time; ``gradients`` is the larger of the two.
        rollout: the weights that generate, and a second copy that receives new weights if it is on
            the device; 0 if the trained weights generate. Experts that are the trainer's do not
            count. The fp8 weights of ``rollout.quantization`` are added. With
            ``free_cache_engine``, if several devices train and generate in turns, only the part
            that exceeds the space of training.
        cache: the keys and values of all concurrent sequences, with the same exception.
        activations: the activations of the largest micro-batch.
        logits: a chunk of logits of response tokens.
        host: what rests in the host's memory for this device between passes or steps: weights and
            optimizer states, with ``offload_policy`` also gradients. It is not part of the total.
            For Muon, it is a lower bound. With several stages of layers, it is the mean over them.
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
    host: int = 0

    @property
    def total(self) -> int:
        """The sum of all parts on the device, times ``ALLOWANCE``."""
        return int((sum(asdict(self).values()) - self.host) * ALLOWANCE)

    def to_gib(self) -> dict[str, float]:
        """Return all parts on the device, their total and what is on the host in GiB, rounded."""
        parts = asdict(self)
        on_host = parts.pop("host")
        parts |= {"total": self.total, "host": on_host}
        return {name: round(value / GIB, 2) for name, value in parts.items()}


@dataclass(frozen=True, slots=True)
class _Model:
    """The weights of a model, or of its largest stage of layers, laid out over ranks.

    Attributes:
        num_parameters: the number of parameters of the whole model.
    """

    sizes: ModelSizes
    config: FsdpConfig
    ranks: RankLayout
    num_parameters: int

    @property
    def mean_of_stages(self) -> float:
        """The size of a stage in the mean, as a share of the largest one."""
        return self.num_parameters / (self.ranks.pipeline_parallel * self.sizes.num_parameters)

    @property
    def stored(self) -> int:
        return BYTES["float32" if self.sizes.adapters else self.config.model_dtype]

    @property
    def computed(self) -> int:
        return BYTES[self.config.dtype]

    @property
    def held_parameters(self) -> int:
        """The number of parameters on one device between passes, without adapters and a frozen
        vision tower.

        Tensor parallelism divides neither experts nor a tower; expert parallelism divides experts.
        """
        sizes, ranks = self.sizes, self.ranks
        routed = sizes.num_expert_layers * sizes.routed_layer_parameters
        tower = sizes.tower - sizes.frozen_tower
        others = sizes.num_parameters - sizes.tower - routed
        others //= ranks.tensor_parallel * ranks.num_shards
        routed //= ranks.expert_parallel * ranks.num_expert_shards
        return others + tower // ranks.num_shards + routed

    @property
    def held_trained(self) -> int:
        """The number of trained parameters on one device between passes."""
        adapters = self.sizes.adapters
        ways = self.ranks.tensor_parallel * self.ranks.num_shards
        return adapters // ways if adapters else self.held_parameters

    @property
    def held_base(self) -> int:
        """The bytes of frozen weights of a model in training between passes: a vision tower and
        the base of adapters.
        """
        base = self.held_parameters if self.sizes.adapters else 0
        return self.computed * (base + self.sizes.frozen_tower)

    @property
    def held_frozen(self) -> int:
        """The bytes of frozen weights between passes, on the device or on the host."""
        return self.computed * (self.held_parameters + self.sizes.frozen_tower)

    @property
    def visiting(self) -> int:
        """The bytes of gathered layers: embedding, head, the current layer and the next one."""
        parameters = self.sizes.embedding_parameters // self.ranks.tensor_parallel
        parameters += 2 * self.layer_parameters
        parameters += 2 * self.sizes.adapters // self.sizes.num_layers // self.ranks.tensor_parallel
        return self.computed * parameters

    @property
    def largest_gradients(self) -> int:
        """An upper bound of the bytes of gradients in the precision of the passes: those of a layer
        and of the embedding. That of the head does not exist, as products add to its sum, nor do
        those of a layer's linear maps.
        """
        embedding = self.sizes.vocabulary * self.sizes.hidden
        return self.computed * (self.layer_parameters + embedding)

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of the largest layer that one device computes."""
        sizes, ranks = self.sizes, self.ranks
        dense, experts = sizes.dense_layer_parameters // ranks.tensor_parallel, sizes.experts
        if experts is None:
            return dense
        routed = sizes.routed_layer_parameters
        others = sizes.expert_layer_parameters(experts.num_experts) - routed
        sparse = others // ranks.tensor_parallel + routed // ranks.expert_parallel
        return max(sparse, dense) if experts.dense_layers else sparse

    @property
    def gathered_frozen(self) -> int:
        """The bytes that a forward pass gathers: none if every rank holds the weights it needs."""
        rests = self.config.param_offload or self.config.offload_policy
        is_held = self.ranks.num_shards == 1 and not rests
        return 0 if is_held else self.visiting

    @property
    def gathered_in_training(self) -> int:
        """The bytes of gathered layers, and of the largest gradient in both precisions of its sum.

        Without ``reshard_after_forward``, and in a stage: all layers, and all gradients in fp32.
        """
        split = self.ranks.tensor_parallel
        largest = max(self.sizes.embedding_parameters // split, self.layer_parameters)
        if self.sizes.adapters:
            largest = self.sizes.adapters // self.sizes.num_layers // split
        if self.config.reshard_after_forward and self.ranks.pipeline_parallel == 1:
            return self.visiting + (self.computed + self.stored) * largest
        sizes, ranks = self.sizes, self.ranks
        routed = sizes.num_expert_layers * sizes.routed_layer_parameters
        tower = sizes.tower - sizes.frozen_tower
        whole = (sizes.num_parameters - sizes.tower - routed) // split + tower
        whole += routed // ranks.expert_parallel
        trained = sizes.adapters // split if sizes.adapters else whole
        summed = self.computed * (whole + sizes.adapters // split)
        return summed + BYTES["float32"] * trained + self.computed * largest


def _laid_out(sizes: ModelSizes, config: FsdpConfig, *, ranks: RankLayout) -> _Model:
    largest = sizes.of_largest_stage(ranks.layers_of_stages(sizes.num_layers))
    return _Model(largest, config, ranks, sizes.num_parameters)


@dataclass(frozen=True, slots=True)
class _Training:
    """A model in training, whose largest micro-batch has ``tokens`` tokens on a device.

    Attributes:
        always_trains: whether nothing else is done on its devices, so that ``param_offload`` has no
            effect on several of them.
    """

    model: _Model
    optim: OptimConfig
    recomputed: RecomputeGranularity | None
    tokens: int
    always_trains: bool = False


def plan_memory(
    config: RunConfig | SftConfig,
    sizes: ModelSizes,
    *,
    auxiliary: Mapping[str, ModelSizes] = NO_MODELS,
    available_bytes: int | None = None,
) -> Mapping[str, MemoryPlan]:
    """Return the memory of one device of each pool, by the name of the pool.

    Args:
        sizes: the sizes of the policy.
        auxiliary: the sizes of ``CRITIC`` and ``REWARD_MODEL``; a missing entry means the sizes of
            the policy.
        available_bytes: the memory of a device; ``rollout.gpu_memory_utilization`` is the share for
            weights and cache. None if no device is known.
    """
    placement, trained = place(config), trained_model(config)
    if trained.adapters is not None:
        sizes = replace(sizes, adapters=trained.adapters.num_parameters(sizes))
    if trained.freezes_tower or trained.adapters is not None:
        sizes = replace(sizes, has_frozen_tower=True)
    if isinstance(config, SftConfig):
        model = _laid_out(sizes, config.engine, ranks=placement.layouts["actor-train"])
        training = _policy_training(config, model)
        return {placement.pools[0].name: _trained(MemoryPlan(), training, placement=placement)}
    plans = {
        pool.name: _of_pool(
            pool, config, sizes=sizes, placement=placement, available_bytes=available_bytes
        )
        for pool in placement.used_pools
    }
    name = placement.pool_of("actor-train").name
    for role in auxiliary_layouts(config):
        own = auxiliary.get(role, sizes)
        plans[name] = _with_auxiliary(
            plans[name], config, role=role, sizes=own, placement=placement
        )
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
        model = _laid_out(sizes, roles.ref.fsdp_config, ranks=layouts["ref_logp"])
        tokens = training_tokens(config, "actor-train", ranks=model.ranks.sequence_parallel)
        plan = _scoring(plan, model, tokens=tokens, placement=placement)
        if reference_of(pool, config=config) == "ref_logp":  # it does not share the base
            held, resting = _frozen(model, placement)
            plan = replace(plan, reference=held, host=plan.host + resting)
    scorer = scorer_of(pool)
    if scorer in ("generate", "logp"):
        model = _laid_out(sizes, roles.actor.fsdp_config, ranks=layouts["logp"])
        tokens = training_tokens(config, "actor-train", ranks=model.ranks.sequence_parallel)
        plan = _scoring(plan, model, tokens=tokens, placement=placement)
        if scorer == "logp":
            copies, (held, resting) = _device_copies(config, placement), _frozen(model, placement)
            plan = replace(plan, weights=copies * held, host=plan.host + resting)
    if "actor-train" in pool.tasks:
        model = _laid_out(sizes, roles.actor.fsdp_config, ranks=layouts["actor-train"])
        plan = _trained(plan, _policy_training(config, model), placement=placement)
        takes_turns = not placement.is_one_process or _fills_its_share(config)
        if config.frees_cache and takes_turns:
            plan = _taking_turns(plan)
    return plan


def _taking_turns(plan: MemoryPlan) -> MemoryPlan:
    """Count only the part of generation that exceeds the space of idle training buffers."""
    room = plan.gradients + plan.gathered + plan.activations + plan.logits
    left = max(0, room - plan.rollout)
    return replace(plan, rollout=max(0, plan.rollout - room), cache=max(0, plan.cache - left))


def wanted_cache(config: RunConfig, sizes: ModelSizes, *, placement: Placement) -> int:
    """Return the bytes of keys and values of all sequences, of full length, that a device may
    generate at once.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    prompts = -(-config.most_prompts_begun // placement.layouts["generate"].num_ranks)
    running = min(rollout.max_num_seqs, prompts * rollout.n)
    # The dense engine, which serves latent attention, stores a prompt once for each sample.
    prompts = -(-running // rollout.n) if sizes.latent is None else running
    tokens = prompts * data.max_prompt_length + running * data.max_response_length
    computed = BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    return computed * sizes.cache_numbers_per_token * tokens


def _generating(
    config: RunConfig, sizes: ModelSizes, *, placement: Placement, available_bytes: int | None
) -> MemoryPlan:
    rollout = config.actor_rollout_ref.rollout
    if rollout.attaches_servers:
        return MemoryPlan()
    cache = wanted_cache(config, sizes, placement=placement)
    computed = BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    held = held_in_generation(config, sizes)
    weights = computed * (held + sizes.adapters)
    quantized = quantized_bytes(config, sizes)
    if available_bytes is not None:
        share = int(rollout.gpu_memory_utilization * available_bytes)
        if _fills_its_share(config):
            weights //= rollout.ranks_per_engine
            return MemoryPlan(rollout=weights, cache=max(0, share - weights))
        cache = min(cache, max(0, share - weights - quantized))
    if _shares_experts(config, placement):
        weights -= computed * (held - _others(sizes))
    weights *= _device_copies(config, placement)
    own = 0 if placement.is_one_process else weights
    return MemoryPlan(rollout=own + quantized, cache=cache)


def _fills_its_share(config: RunConfig) -> bool:
    """Return whether the engine has weights of its own, and a cache of all that is left of its
    share of the device, however much its sequences need.
    """
    rollout = config.actor_rollout_ref.rollout
    return rollout.name in ("vllm", "sglang") and not rollout.attaches_servers


def held_in_generation(config: RunConfig, sizes: ModelSizes) -> int:
    """Return the number of parameters that a device computes with in generation."""
    others = _others(sizes)
    routed = sizes.num_parameters - others
    return others + routed // config.actor_rollout_ref.rollout.expert_peers


def least_generating(config: RunConfig, sizes: ModelSizes) -> tuple[int, int]:
    """Return the bytes of the generating weights, and of the cache of one longest sequence."""
    trained = trained_model(config)
    computed = BYTES[config.actor_rollout_ref.actor.fsdp_config.dtype]
    pages = 1 + -(-trained.max_tokens // CACHE_PAGE_TOKENS)  # one for rounding
    cached = sizes.cache_numbers_per_token * pages * CACHE_PAGE_TOKENS
    held = held_in_generation(config, sizes)
    if trained.adapters is not None:
        held += trained.adapters.num_parameters(sizes)
    return computed * held + quantized_bytes(config, sizes), computed * cached


def _others(sizes: ModelSizes) -> int:
    """Return the number of parameters that do not belong to one expert of several."""
    return sizes.num_parameters - sizes.num_expert_layers * sizes.routed_layer_parameters


def _shares_experts(config: RunConfig, placement: Placement) -> bool:
    """Return whether the experts of training and generation are divided alike, in one storage."""
    ranks, own = placement.layouts["actor-train"], config.actor_rollout_ref.actor.fsdp_config
    divided = config.actor_rollout_ref.rollout.expert_peers
    is_alike = 1 < divided == ranks.expert_parallel and ranks.num_expert_shards == 1
    is_alike = is_alike and ranks.pipeline_parallel == 1
    leaves = own.param_offload or own.offload_policy
    return is_alike and BYTES[own.dtype] == BYTES[own.model_dtype] and not leaves


def quantized_bytes(config: RunConfig, sizes: ModelSizes) -> int:
    """Return the bytes of the fp8 weights of generation; 0 without them."""
    is_quantized = config.actor_rollout_ref.rollout.quantization is not None
    return sizes.quantized_parameters if is_quantized else 0


def _device_copies(config: RunConfig, placement: Placement) -> int:
    """Return the number of copies of received weights on a device."""
    rollout = config.actor_rollout_ref.rollout
    has_second = rollout.enable_dual_buffer and not rollout.enable_param_async
    return 2 if has_second and placement.generates_apart else 1


def _scoring(plan: MemoryPlan, model: _Model, *, tokens: int, placement: Placement) -> MemoryPlan:
    """Add the forward passes of a frozen model, which hold the activations of one layer."""
    kept = model.computed * tokens
    kept *= model.sizes.layer_numbers_per_token(
        model.ranks.tensor_parallel, expert_parallel=model.ranks.expert_parallel
    )
    return replace(
        plan,
        gathered=0 if placement.is_one_process else max(plan.gathered, model.gathered_frozen),
        activations=max(plan.activations, kept),
        logits=LOGITS_BYTES,
    )


def _frozen(model: _Model, placement: Placement) -> tuple[int, int]:
    """Return the bytes of frozen weights between passes, on the device and on the host."""
    if placement.is_one_process:
        # While it scores there are no gradients of training, which are larger.
        held, rests = model.computed * model.sizes.num_parameters, model.config.param_offload
    else:
        held, rests = model.held_frozen, model.config.param_offload or model.config.offload_policy
    return (0, int(held * model.mean_of_stages)) if rests else (held, 0)


def _policy_training(config: RunConfig | SftConfig, model: _Model) -> _Training:
    own = trained_model(config).of_task["actor-train"]
    assert own.optim is not None, "a model in training has an optimizer"
    tokens = training_tokens(config, "actor-train", ranks=model.ranks.sequence_parallel)
    always_trains = isinstance(config, SftConfig)
    return _Training(model, own.optim, _recomputed(own.config), tokens, always_trains)


def _with_auxiliary(
    plan: MemoryPlan, config: RunConfig, *, role: str, sizes: ModelSizes, placement: Placement
) -> MemoryPlan:
    """Add the critic, which is trained before or after the policy, or the reward model."""
    ranks = placement.layouts[role]
    # A value head is one row: there is no second matrix of the size of the vocabulary.
    model = _laid_out(replace(sizes, tied=True), auxiliary_layouts(config)[role], ranks=ranks)
    tokens = training_tokens(config, role, ranks=ranks.sequence_parallel)
    if role == REWARD_MODEL:
        plan = _scoring(plan, model, tokens=tokens, placement=placement)
        held, resting = _frozen(model, placement)
        return replace(plan, reward_model=held, host=plan.host + resting)
    critic = config.critic
    training = _Training(model, critic.optim, _recomputed(critic.model), tokens)
    own = _trained(MemoryPlan(), training, placement=placement)
    return replace(
        plan,
        critic=own.weights + own.optimizer,
        gradients=max(plan.gradients, own.gradients),
        gathered=max(plan.gathered, own.gathered),
        activations=max(plan.activations, own.activations),
        host=plan.host + own.host,
    )


def _trained(plan: MemoryPlan, training: _Training, *, placement: Placement) -> MemoryPlan:
    """Add training. An offloaded part counts only as far as it exceeds space that is free then."""
    model, optim = training.model, training.optim
    numbers = model.sizes.kept_numbers_per_token(
        training.recomputed,
        tensor_parallel=model.ranks.tensor_parallel,
        expert_parallel=model.ranks.expert_parallel,
        num_batches=model.ranks.pipeline_parallel,  # those of the first stage
    )
    activations = max(plan.activations, model.computed * training.tokens * numbers)
    moment = model.stored if optim.moments_dtype == "auto" else BYTES[optim.moments_dtype]
    optimizer = 2 * moment * model.held_trained
    states = model.stored * model.held_trained if optim.optimizer == "Muon" else optimizer
    plan = replace(plan, activations=activations, logits=LOGITS_BYTES)
    room = activations + LOGITS_BYTES  # while the optimizer steps
    visitors = model.held_trained
    if optim.optimizer != "Muon":
        visitors = min(visitors, model.sizes.visiting_parameters)
    if placement.is_one_process:
        kept, computed = (x * model.sizes.num_trained for x in (model.stored, model.computed))
        held = kept if kept == computed else kept + computed
        weights = held
        if model.config.param_offload and kept != computed:
            plan = replace(plan, host=plan.host + kept)
            visiting = model.stored * visitors
            weights = computed + max(0, visiting - room)
            room = max(0, room - visiting)
        sums = kept if kept == computed else kept + min(computed, model.largest_gradients)
        plan = replace(plan, weights=weights + model.held_base, gradients=sums)
    if model.config.optimizer_offload:
        optimizer = max(0, 2 * moment * visitors - room)
    resting = states if model.config.optimizer_offload else 0
    if placement.is_one_process:
        return replace(plan, optimizer=optimizer, host=plan.host + resting)
    plan = replace(plan, gathered=max(plan.gathered, model.gathered_in_training))
    held = model.stored * model.held_trained
    weights = held + model.held_base
    if model.config.offload_policy:
        resting = weights + held + states
    elif model.config.param_offload and not training.always_trains:
        resting += weights
    plan = replace(plan, host=plan.host + int(resting * model.mean_of_stages))
    if model.config.offload_policy:
        return plan
    return replace(plan, weights=weights, gradients=held, optimizer=optimizer)


def _recomputed(model: ModelConfig) -> RecomputeGranularity | None:
    return model.recompute_granularity if model.enable_gradient_checkpointing else None
