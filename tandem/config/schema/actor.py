# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.actor.*``: loss, optimizer steps and layout of the trained policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.dotted import ByName, traits_of
from tandem.config.schema.fields import SECTION, TRAINS, Seed, read_if
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.optim import OptimConfig

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
"""The KL estimators. A trailing ``+`` replaces the gradient by that of k2, as in verl."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The traits of a policy loss.

    Attributes:
        is_sequence_level: whether the loss is a mean over sequences, which is always aggregated by
            ``seq-mean-token-mean``.
        clips_log_ratio: whether the clip range bounds the log-ratio, so that ``clip_ratio_low`` may
            be 1 or more. Otherwise it bounds the ratio, which is positive.
        reads: the keys below ``actor_rollout_ref.actor`` that the loss reads.
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
"""The built-in policy losses by name; ``algorithms.losses`` computes them."""

LossName = Annotated[str, ByName(LOSSES)]


def loss_traits(loss_mode: str) -> Loss:
    """Return the traits of a value of ``policy_loss.loss_mode``.

    Raises:
        UserError: the user's function cannot be imported.
    """
    return traits_of("actor_rollout_ref.actor.policy_loss.loss_mode", loss_mode, known=LOSSES)


class PolicyLossConfig(BaseModel):
    """``policy_loss.*``: the policy loss."""

    model_config = SECTION

    loss_mode: LossName = Field(
        default="vanilla",
        description="Policy loss. vanilla: PPO with dual clip; gspo: sequence ratio; cispo: "
        "clipped weights; gpg: plain policy gradient; geo_mean: GMPO; or a function of your own as "
        "package.module:function.",
    )

    @property
    def traits(self) -> Loss:
        """The traits of ``loss_mode``; raises UserError if it cannot be imported."""
        return loss_traits(self.loss_mode)


class MegatronConfig(BaseModel):
    """``megatron.*``: the layout of Megatron, which is not built yet."""

    model_config = SECTION

    expert_model_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Number of devices over which the experts of a layer are split. Not built yet: "
        "tandem plan only warns if it exceeds the number of devices that train.",
    )


class ActorConfig(BaseModel):
    """The policy in training."""

    model_config = SECTION

    strategy: Literal["fsdp", "fsdp2", "megatron"] = Field(
        default="fsdp",
        description="Training back end. fsdp and fsdp2 are the same engine (FSDP2); "
        "megatron is not built yet.",
    )
    ppo_mini_batch_size: int = Field(
        default=256,
        ge=1,
        description="Number of prompts per optimizer step. The number of sequences is this times "
        "rollout.n.",
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward and backward pass. null: "
        "micro-batches are filled up to ppo_max_token_len_per_gpu tokens. Results do "
        "not depend on this key.",
    )
    use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of counting "
        "sequences.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Number of passes over each batch.")
    shuffle: bool = Field(
        default=False, description="Shuffle the sequences of a batch before it is split."
    )
    data_loader_seed: Seed = Field(
        default=42,
        ge=0,
        description="Seed of actor.shuffle.",
        json_schema_extra=read_if("shuffle=True"),
    )
    policy_loss: PolicyLossConfig = Field(
        default_factory=PolicyLossConfig, description="The policy loss."
    )
    clip_ratio: float = Field(
        default=0.2,
        gt=0,
        description="Clip range of the probability ratio, on both sides of 1.",
    )
    clip_ratio_low: float | None = Field(
        default=None, gt=0, description="Clip range below 1. null: clip_ratio."
    )
    clip_ratio_high: float | None = Field(
        default=None, gt=0, description="Clip range above 1 (DAPO's clip-higher). null: clip_ratio."
    )
    clip_ratio_c: float = Field(
        default=3.0,
        gt=1,
        description="Upper bound of the ratio for negative advantages (dual clip).",
    )
    loss_agg_mode: LossAggregation = Field(
        default="token-mean", description="How the losses of tokens are reduced to one number."
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="Divisor of seq-mean-token-sum-norm. null: data.max_response_length.",
        json_schema_extra=read_if("loss_agg_mode=seq-mean-token-sum-norm"),
    )
    entropy_coeff: float = Field(default=0.0, description="Weight of the entropy bonus.")
    use_kl_loss: bool = Field(
        default=False, description="Add the KL divergence from the reference policy to the loss."
    )
    kl_loss_coef: float = Field(
        default=0.001,
        ge=0,
        description="Weight of the KL divergence in the loss.",
        json_schema_extra=read_if("use_kl_loss=True"),
    )
    kl_loss_type: KlEstimator = Field(
        default="low_var_kl",
        description="Estimator of the KL divergence in the loss.",
        json_schema_extra=read_if("use_kl_loss=True"),
    )
    optim: OptimConfig = Field(
        default_factory=OptimConfig,
        description="Optimizer and schedule.",
        json_schema_extra=read_if(TRAINS),
    )
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )
    load_weight: bool = Field(
        default=True,
        description="Load the weights of the model. False: initialize them at random.",
    )
    megatron: MegatronConfig = Field(
        default_factory=MegatronConfig, description="Megatron's layout."
    )

    @property
    def clip_low(self) -> float:
        """``clip_ratio_low``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """``clip_ratio_high``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
