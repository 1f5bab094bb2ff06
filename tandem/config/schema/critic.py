# SPDX-License-Identifier: Apache-2.0
"""``critic.*``: the value model that ``algorithm.adv_estimator=gae`` needs, and its updates.

The critic is on the devices of actor-train and has its own layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from tandem.config.schema.actor import LossAggregation
from tandem.config.schema.fields import LearningRate, Section, Seed, read_if
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig

_FOLLOWS_ACTOR = (
    "ppo_mini_batch_size",
    "ppo_epochs",
    "use_dynamic_bsz",
    "shuffle",
    "data_loader_seed",
    "loss_agg_mode",
    "loss_scale_factor",
)
CRITIC_FOLLOWS: Mapping[str, str] = {
    **{f"critic.{key}": f"actor_rollout_ref.actor.{key}" for key in _FOLLOWS_ACTOR},
    "critic.model.path": "actor_rollout_ref.model.path",
    "critic.model.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "critic.forward_micro_batch_size_per_gpu": "critic.ppo_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu": "critic.ppo_max_token_len_per_gpu",
}
"""Key -> the key that it follows if it is not set, as in verl."""


class CriticOptimConfig(OptimConfig):
    """The optimizer of the critic."""

    lr: LearningRate = 1e-5


class CriticModelConfig(ModelConfig):
    """A critic, or a language model whose head is replaced by a value head."""

    path: str = Field(
        default="",
        description="Folder or hub name of a critic, or of a language model to start from. Not "
        "set: actor_rollout_ref.model.path.",
    )
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )


class CriticConfig(Section):
    """The critic."""

    enable: bool | None = Field(
        default=None,
        description="Train a critic. null: only if algorithm.adv_estimator needs one, as gae does.",
    )
    model: CriticModelConfig = Field(
        default_factory=CriticModelConfig, description="The model the critic starts from."
    )
    optim: CriticOptimConfig = Field(
        default_factory=CriticOptimConfig, description="Optimizer and schedule."
    )
    ppo_mini_batch_size: int = Field(
        default=256,
        ge=1,
        description="Number of prompts per optimizer step. Not set: the actor's number. "
        "ppo_epochs, shuffle, data_loader_seed, loss_agg_mode, loss_scale_factor and "
        "use_dynamic_bsz follow the actor in the same way.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Number of passes over each batch.")
    shuffle: bool = Field(
        default=False, description="Shuffle the sequences of a batch before it is split."
    )
    data_loader_seed: Seed = Field(
        default=42,
        ge=0,
        description="Seed of critic.shuffle.",
        json_schema_extra=read_if("shuffle=True"),
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
    use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches up to *_max_token_len_per_gpu tokens instead of counting "
        "sequences.",
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward and backward pass. null: "
        "micro-batches are filled by tokens.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens.",
    )
    forward_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward pass that computes values. Not set: "
        "ppo_micro_batch_size_per_gpu.",
    )
    forward_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="Maximum number of tokens per device in a forward pass that computes values. "
        "Not set: ppo_max_token_len_per_gpu.",
    )
    cliprange_value: float = Field(
        default=0.5,
        gt=0,
        description="Clip range of the change of a value in the loss.",
    )
