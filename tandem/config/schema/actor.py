# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.actor.*``: loss, optimizer steps and layout of the trained policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from tandem.config.schema.dotted import ByName, traits_of
from tandem.config.schema.fields import TRAINS, Section, Seed, read_if
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
        accepts_any_low: whether ``clip_ratio_low`` may be 1 or more: it bounds no ratio, or the
            loss also makes sense without a lower bound. A ratio is positive.
        weighs_sequences: whether a sequence is weighed by the geometric mean of its importance
            weights. Otherwise each token is weighed by its own.
        computes_all: whether sequences of advantage 0 are computed: they have a gradient, or count
            in a statistic of the loss.
        marks_tokens: whether the loss treats some tokens of a mini-batch apart. Each optimizer step
            is then preceded by a pass of the policy over its mini-batch, which finds them.
        reads: the keys below ``actor_rollout_ref.actor`` that the loss reads.
    """

    is_sequence_level: bool = False
    accepts_any_low: bool = False
    weighs_sequences: bool = False
    computes_all: bool = False
    marks_tokens: bool = False
    reads: tuple[str, ...] = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


_BOTH_SIDES = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_DIVERGENCE = Loss(accepts_any_low=True)

LOSSES: dict[str, Loss] = {
    "vanilla": Loss(),
    "gspo": Loss(is_sequence_level=True, reads=_BOTH_SIDES),
    "sapo": Loss(is_sequence_level=True, reads=("tau_pos", "tau_neg")),
    "cispo": Loss(accepts_any_low=True, reads=_BOTH_SIDES),
    "gpg": Loss(reads=()),
    "geo_mean": Loss(
        is_sequence_level=True, accepts_any_low=True, weighs_sequences=True, reads=_BOTH_SIDES
    ),
    "dppo_tv": _DIVERGENCE,
    "dppo_kl": _DIVERGENCE,
    "clip_cov": Loss(
        accepts_any_low=True,
        computes_all=True,
        marks_tokens=True,
        reads=(*_BOTH_SIDES, *(f"policy_loss.clip_cov_{key}" for key in ("ratio", "lb", "ub"))),
    ),
    "kl_cov": Loss(
        computes_all=True,
        marks_tokens=True,
        reads=("policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef"),
    ),
    "dro": Loss(computes_all=True, reads=("policy_loss.dro_beta",)),
}
"""The built-in policy losses by name; ``algorithms.losses`` computes them."""

LossName = Annotated[str, ByName(LOSSES)]


def loss_traits(loss_mode: str) -> Loss:
    """Return the traits of a value of ``policy_loss.loss_mode``.

    Raises:
        UserError: the user's function cannot be imported.
    """
    return traits_of(
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        loss_mode,
        known=LOSSES,
        arguments=("terms", "settings"),
    )


class PolicyLossConfig(Section):
    """``policy_loss.*``: the policy loss."""

    loss_mode: LossName = Field(
        default="vanilla",
        description="Policy loss. vanilla: PPO with dual clip; gspo: sequence ratio; sapo: smooth "
        "gate; cispo: clipped weights; gpg: plain policy gradient; geo_mean: GMPO; dppo_tv, "
        "dppo_kl: divergence instead of ratio; clip_cov, kl_cov: tokens of high covariance apart; "
        "dro: squared log-ratio; or a function of your own as package.module:function.",
    )
    clip_cov_ratio: float = Field(
        default=0.0002,
        gt=0,
        le=1,
        description="Share of the tokens of a mini-batch whose gradient clip_cov removes.",
    )
    clip_cov_lb: float = Field(
        default=1.0, description="Lower bound of the covariance of tokens that clip_cov may choose."
    )
    clip_cov_ub: float = Field(
        default=5.0, description="Upper bound of the covariance of tokens that clip_cov may choose."
    )
    kl_cov_ratio: float = Field(
        default=0.0002,
        gt=0,
        le=1,
        description="Share of the tokens of a mini-batch, those of the largest covariance, that "
        "kl_cov keeps near the old policy.",
    )
    ppo_kl_coef: float = Field(
        default=0.1, ge=0, description="Weight of kl_cov's penalty on the absolute log-ratio."
    )
    dro_beta: float | None = Field(
        default=None,
        gt=0,
        description="Weight of dro's penalty on the squared log-ratio; it has no default.",
    )

    @property
    def traits(self) -> Loss:
        """The traits of ``loss_mode``; raises UserError if it cannot be imported."""
        return loss_traits(self.loss_mode)


DEFAULT_MINI_BATCH = 256


class RouterReplayConfig(Section):
    """``router_replay.*``: the experts that the trainer sends tokens to."""

    mode: Literal["disabled", "R2", "R3"] = Field(
        default="disabled",
        description="For models with experts. disabled: the trainer's routers choose. R3: each "
        "token goes to the experts that computed it in the rollout. R2: to those that "
        "computed it in the pass for old log-probs.",
    )


class ActorConfig(Section):
    """The policy in training."""

    strategy: Literal["fsdp", "fsdp2", "megatron"] = Field(
        default="fsdp",
        description="Keys that lay out weights over devices. fsdp, fsdp2: those of fsdp_config. "
        "megatron: those of megatron, for the same engine (FSDP2).",
    )
    ppo_mini_batch_size: int = Field(
        default=DEFAULT_MINI_BATCH,
        ge=1,
        description="Number of prompts per optimizer step. The number of sequences is this times "
        "rollout.n. If it is not set, it is at most data.train_batch_size.",
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
        "tokens. Not set, on accelerators of one kind: lowered if their memory asks for it.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Number of passes over each batch.")
    shuffle: bool = Field(
        default=False, description="Shuffle the sequences of a batch before it is split."
    )
    data_loader_seed: Seed = Field(
        default=42,
        ge=0,
        description="Seed of actor.shuffle.",
    )
    policy_loss: PolicyLossConfig = Field(
        default_factory=PolicyLossConfig, description="The policy loss."
    )
    clip_ratio: float = Field(
        default=0.2,
        gt=0,
        description="Clip range of the probability ratio, on both sides of 1; with dppo_tv and "
        "dppo_kl, of the divergence.",
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
        description="Upper bound of the ratio for negative advantages (dual clip); of the weight "
        "of dppo_tv and dppo_kl.",
    )
    tau_pos: float = Field(
        default=1.0, gt=0, description="Temperature of sapo's gate for positive advantages."
    )
    tau_neg: float = Field(
        default=1.05, gt=0, description="Temperature of sapo's gate for other advantages."
    )
    loss_agg_mode: LossAggregation = Field(
        default="token-mean", description="How the losses of tokens are reduced to one number."
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="Divisor of seq-mean-token-sum-norm. null: data.max_response_length.",
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
    freeze_vision_tower: bool = Field(
        default=False,
        description="Train the decoder of a model that sees, and not its vision tower. No effect "
        "on models of text.",
    )
    freeze_moe_router: bool = Field(
        default=False,
        description="Train a model with experts, and neither its routers nor the gates of shared "
        "experts.",
    )
    load_weight: bool = Field(
        default=True,
        description="Load the weights of the model. False: initialize them at random.",
    )
    router_replay: RouterReplayConfig = Field(
        default_factory=RouterReplayConfig, description="Replay of routers' choices."
    )

    @property
    def clip_low(self) -> float:
        """``clip_ratio_low``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """``clip_ratio_high``, or ``clip_ratio`` if that is null."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
