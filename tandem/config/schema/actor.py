# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.actor.*``: loss, optimizer steps and layout of the trained policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.dotted import ByName, traits_of
from tandem.config.schema.fields import (
    ALWAYS_PACKED,
    NOT_BUILT,
    SECTION,
    Seed,
    Strings,
    no_effect,
)
from tandem.config.schema.fsdp import FsdpConfig, MegatronConfig
from tandem.config.schema.optim import OptimConfig

__all__ = [
    "ActorConfig",
    "CheckpointConfig",
    "FsdpConfig",
    "MegatronConfig",
    "OptimConfig",
    "PolicyLossConfig",
]

LossAggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
KlEstimator = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
"""A trailing + takes the gradient of k2 (verl's straight-through variant)."""

_CHECKPOINT = (
    "a checkpoint always holds weights, optimizer, schedule and data; "
    "tandem export writes a model folder"
)
_MEGATRON = "not built yet: strategy=megatron"
_ENTROPY = "entropy is always computed in chunks and recomputed in the backward pass"


@dataclass(frozen=True, slots=True)
class Loss:
    """The traits of a policy loss.

    Attributes:
        is_sequence_level: it is a mean over sequences: always aggregated by seq-mean-token-mean.
        clips_log_ratio: the clip range bounds the log-ratio, so that ``clip_ratio_low`` may be 1
            or more; otherwise it bounds the ratio, which is positive.
        reads: the keys below ``actor_rollout_ref.actor`` that it reads.
    """

    is_sequence_level: bool = False
    clips_log_ratio: bool = False
    reads: tuple[str, ...] = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


_BOTH_SIDES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

LOSSES: dict[str, Loss] = {
    "vanilla": Loss(),
    "gspo": Loss(is_sequence_level=True, reads=_BOTH_SIDES),
    "cispo": Loss(reads=_BOTH_SIDES),
    "gpg": Loss(reads=()),
    "geo_mean": Loss(is_sequence_level=True, clips_log_ratio=True, reads=_BOTH_SIDES),
}
"""The built-in policy losses by their names; ``algorithms.losses`` computes them."""

LossName = Annotated[str, ByName(LOSSES)]


def loss_traits(loss_mode: str) -> Loss:
    """Return the traits of a value of ``policy_loss.loss_mode``.

    Raises:
        UserError: a function of the user cannot be imported.
    """
    return traits_of("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, known=LOSSES)


class PolicyLossConfig(BaseModel):
    """``policy_loss.*``: which policy loss."""

    model_config = SECTION

    loss_mode: LossName = Field(
        default="vanilla",
        description="vanilla: PPO with dual clip; gspo: sequence ratio; cispo: clipped weights; "
        "gpg: plain policy gradient; geo_mean: GMPO; or a function of your own as "
        "package.module:function.",
    )

    @property
    def traits(self) -> Loss:
        """The traits of ``loss_mode``; raises UserError if it cannot be imported."""
        return loss_traits(self.loss_mode)


class CheckpointConfig(BaseModel):
    """``checkpoint.*``: what verl's checkpoints hold."""

    model_config = SECTION

    save_contents: Strings = Field(
        default=("model", "optimizer", "extra"), description="Parts to save."
    )
    load_contents: Strings = Field(
        default=("model", "optimizer", "extra"), description="Parts to load."
    )
    async_save: bool = Field(default=False, description="Save in the background.")


class ActorConfig(BaseModel):
    """The policy in training."""

    model_config = SECTION

    strategy: Literal["fsdp", "fsdp2", "megatron"] = Field(
        default="fsdp",
        description="Training back end. fsdp and fsdp2 are one engine here (FSDP2); "
        "megatron is not built yet.",
    )
    ppo_mini_batch_size: int = Field(
        default=256, ge=1, description="Prompts per optimizer step (times rollout.n sequences)."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences of one forward and backward pass; null packs micro-batches up "
        "to ppo_max_token_len_per_gpu. Results do not depend on it.",
    )
    use_dynamic_bsz: bool = Field(
        default=False, description="Fill micro-batches up to ppo_max_token_len_per_gpu tokens."
    )
    ppo_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="Most tokens of a device in a micro-batch filled by tokens.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Passes over each batch.")
    shuffle: bool = Field(
        default=False, description="Shuffle sequences before cutting mini-batches."
    )
    data_loader_seed: Seed = Field(default=42, ge=0, description="Seed of that shuffle.")
    policy_loss: PolicyLossConfig = Field(
        default_factory=PolicyLossConfig, description="Which policy loss."
    )
    clip_ratio: float = Field(
        default=0.2, gt=0, description="Clip range of the probability ratio, for both sides."
    )
    clip_ratio_low: float | None = Field(
        default=None, gt=0, description="Clip range below 1; null takes clip_ratio."
    )
    clip_ratio_high: float | None = Field(
        default=None,
        gt=0,
        description="Clip range above 1 (DAPO's clip-higher); null takes clip_ratio.",
    )
    clip_ratio_c: float = Field(
        default=3.0, gt=1, description="Bound of the ratio for negative advantages (dual clip)."
    )
    loss_agg_mode: LossAggregation = Field(
        default="token-mean", description="How token losses become one number."
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="Divisor of seq-mean-token-sum-norm; null takes data.max_response_length.",
    )
    entropy_coeff: float = Field(default=0.0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(
        default=False, description="Add KL to the reference policy to the loss."
    )
    kl_loss_coef: float = Field(default=0.001, ge=0, description="Weight of that KL.")
    kl_loss_type: KlEstimator = Field(default="low_var_kl", description="Estimator of that KL.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="Optimizer and schedule.")
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )
    load_weight: bool = Field(
        default=True, description="Load weights; False starts from random ones."
    )

    use_torch_compile: bool = no_effect(
        True, "Compile parts of the training step.", why="not built yet: nothing is compiled so far"
    )
    megatron: MegatronConfig = no_effect(MegatronConfig, "Megatron's layout.", why=_MEGATRON)
    checkpoint: CheckpointConfig = no_effect(
        CheckpointConfig, "Parts of a checkpoint.", why=_CHECKPOINT
    )
    ppo_micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use ppo_micro_batch_size_per_gpu",
    )
    entropy_from_logits_with_chunking: bool = no_effect(False, "Chunked entropy.", why=_ENTROPY)
    entropy_checkpointing: bool = no_effect(False, "Recomputed entropy.", why=_ENTROPY)
    calculate_entropy: bool = no_effect(
        False, "Report entropy.", why="actor/entropy is always reported"
    )
    use_remove_padding: bool = no_effect(True, "Train without padding.", why=ALWAYS_PACKED)
    use_fused_kernels: bool = no_effect(
        False, "Fused log-probs.", why="log-probs are always computed fused and in chunks"
    )
    use_prefix_grouper: bool = no_effect(
        False, "Share prompts in training.", why="samples of one prompt always share it in training"
    )
    freeze_vision_tower: bool = no_effect(False, "Freeze vision.", why="models are text only")
    profiler: dict[str, Any] = no_effect(dict[str, Any], "Profiler of the actor.", why=NOT_BUILT)

    @property
    def clip_low(self) -> float:
        """``clip_ratio_low``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """``clip_ratio_high``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.use_dynamic_bsz or self.ppo_micro_batch_size_per_gpu is None
        return self.ppo_max_token_len_per_gpu if by_tokens else None
