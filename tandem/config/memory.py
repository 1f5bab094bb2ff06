# SPDX-License-Identifier: Apache-2.0
"""What a run on one accelerator needs of its memory, from the configuration and the model's sizes.

An estimate of the largest parts; libraries' work space and the allocator's gaps are an allowance on
top. On CPUs nothing is checked: memory there is virtual and swapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tandem.config.run import RunConfig
from tandem.errors import UserError

GIB = 1 << 30
LOGITS_BYTES = 3 * GIB
"""A chunk of fp32 logits and its gradient in half precision (``models.kernels.logprob``)."""
ALLOWANCE = 1.1
"""For work space and gaps; chosen, not measured."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_SIZE_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Of a dense decoder."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelSizes | None:
        """From the content of config.json; None if it does not say."""
        if not all(isinstance(hf_config.get(key), int) for key in (*_SIZE_KEYS, "vocab_size")):
            return None
        layers, hidden, inner, heads = (hf_config[key] for key in _SIZE_KEYS)
        return cls(
            num_layers=layers,
            hidden=hidden,
            inner=inner,
            num_heads=heads,
            num_kv_heads=hf_config.get("num_key_value_heads") or heads,
            head_dim=hf_config.get("head_dim") or hidden // heads,
            vocabulary=hf_config["vocab_size"],
            tied=bool(hf_config.get("tie_word_embeddings", False)),
        )

    @property
    def num_parameters(self) -> int:
        """Matrices; biases and norms are less than a thousandth."""
        heads = 2 * self.num_heads + 2 * self.num_kv_heads
        layer = self.hidden * (heads * self.head_dim + 3 * self.inner)
        return self.num_layers * layer + (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def cache_numbers_per_token(self) -> int:
        """2 (key and value) x layers x heads x head dimension."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def layer_numbers_per_token(self) -> int:
        """What one layer keeps of a token for its backward pass: both sums in fp32 (4 D) and their
        norms (2 D), query, key and value before and after rotation, the attention's output, gate,
        up and their product.
        """
        heads = 3 * self.num_heads + 3 * self.num_kv_heads
        return 6 * self.hidden + heads * self.head_dim + 3 * self.inner


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device at the same time.

    Attributes:
        weights: as they are kept and, if in another precision, as they are computed with.
        gradients: likewise.
        optimizer: two moments a weight; with ``optimizer_offload`` only what does not fit where
            activations have been.
        reference: a frozen copy, 0 without one.
        cache: keys and values of all sequences that run together.
        activations: of the largest micro-batch.
        logits: of a chunk of response tokens.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    cache: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """The sum with its allowance."""
        return int(sum(asdict(self).values()) * ALLOWANCE)

    def to_gib(self) -> dict[str, float]:
        """For people: GiB, rounded."""
        parts = {**asdict(self), "total": self.total}
        return {name: round(value / GIB, 2) for name, value in parts.items()}


def plan_memory(
    config: RunConfig, sizes: ModelSizes, *, available_bytes: int | None = None
) -> MemoryPlan:
    """The parts, on an accelerator.

    Args:
        available_bytes: the device's memory, of which ``rollout.gpu_memory_utilization`` bounds
            weights and cache; None if no device is known.
    """
    layout = config.actor_rollout_ref.actor.fsdp_config
    stored, computed = _BYTES[layout.model_dtype], _BYTES[layout.dtype]
    copies = stored if stored == computed else stored + computed
    weights = sizes.num_parameters
    optimizer = 2 * stored * weights
    activations = computed * _microbatch_tokens(config) * _kept_per_token(config, sizes)
    if layout.optimizer_offload:
        optimizer = max(0, optimizer - activations - LOGITS_BYTES)
    cache = computed * sizes.cache_numbers_per_token * _cached_tokens(config)
    if available_bytes is not None:
        share = config.actor_rollout_ref.rollout.gpu_memory_utilization
        cache = min(cache, max(0, int(share * available_bytes) - computed * weights))
    return MemoryPlan(
        weights=copies * weights,
        gradients=copies * weights,
        optimizer=optimizer,
        reference=computed * weights if config.needs_reference else 0,
        cache=cache,
        activations=activations,
        logits=LOGITS_BYTES,
    )


def require_memory(config: RunConfig, sizes: ModelSizes, *, available_bytes: int) -> None:
    """Raise UserError, with an override that fits, if the run cannot fit ``available_bytes``."""
    plan = plan_memory(config, sizes, available_bytes=available_bytes)
    if plan.total <= available_bytes:
        return
    remedy = _remedy(config, sizes, available_bytes=available_bytes)
    raise UserError(
        f"memory: this run needs about {plan.total / GIB:.0f} GiB (weights, gradients and "
        f"optimizer {(plan.weights + plan.gradients + plan.optimizer) / GIB:.0f}, cache "
        f"{plan.cache / GIB:.0f}, activations {plan.activations / GIB:.0f}) of "
        f"{available_bytes / GIB:.0f} GiB. {remedy}"
    )


def _remedy(config: RunConfig, sizes: ModelSizes, *, available_bytes: int) -> str:
    """The first override that makes it fit."""
    for override, changed in _candidates(config):
        plan = plan_memory(changed, sizes, available_bytes=available_bytes)
        if plan.total <= available_bytes:
            return f"Set {override}."
    return "Use a smaller model or a device with more memory."


def _candidates(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Overrides from the cheapest to the dearest, each with what it leads to."""
    roles = config.actor_rollout_ref
    longest = config.data.max_prompt_length + config.data.max_response_length
    candidates: list[tuple[str, RunConfig]] = []
    checkpointing = ("actor_rollout_ref.model.enable_gradient_checkpointing=True",)
    for extra in ((), checkpointing):
        budget = max(longest, _microbatch_tokens(config))
        while budget >= longest:
            actor = roles.actor.model_copy(
                update={"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": budget}
            )
            model = roles.model.model_copy(
                update={"enable_gradient_checkpointing": True} if extra else {}
            )
            changed = roles.model_copy(update={"actor": actor, "model": model})
            override = " ".join(
                (
                    "actor_rollout_ref.actor.use_dynamic_bsz=True",
                    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={budget}",
                    *extra,
                )
            )
            candidates.append((override, config.model_copy(update={"actor_rollout_ref": changed})))
            if budget == longest:
                break
            budget = max(longest, budget // 2)
    return candidates


def _cached_tokens(config: RunConfig) -> int:
    """Of the sequences that run together: shared prompts once, responses whole."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    running = min(rollout.max_num_seqs, config.sequences_per_step)
    prompts = -(-running // rollout.n)
    return prompts * data.max_prompt_length + running * data.max_response_length


def _microbatch_tokens(config: RunConfig) -> int:
    actor, data = config.actor_rollout_ref.actor, config.data
    longest = data.max_prompt_length + data.max_response_length
    by_tokens = actor.microbatch_tokens
    if by_tokens is not None:
        return by_tokens
    return (actor.ppo_micro_batch_size_per_gpu or 1) * longest


def _kept_per_token(config: RunConfig, sizes: ModelSizes) -> int:
    """Numbers kept for the backward pass: all layers', or with recomputation their inputs and one
    layer's."""
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        return sizes.num_layers * 2 * sizes.hidden + sizes.layer_numbers_per_token
    return sizes.num_layers * sizes.layer_numbers_per_token
