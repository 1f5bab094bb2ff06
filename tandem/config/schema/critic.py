# SPDX-License-Identifier: Apache-2.0
"""``critic.*``: the model of values that ``algorithm.adv_estimator=gae`` needs, and its updates.

It lives on the devices of actor-train, laid out as its own keys say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from tandem.config.schema.actor import CheckpointConfig, LossAggregation
from tandem.config.schema.fields import NOT_BUILT, SECTION, Seed, no_effect
from tandem.config.schema.fsdp import FsdpConfig, MegatronConfig
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
"""Keys that take the value of others if they are not set, as in verl."""

_ACTORS_STRATEGY = "one engine trains both models; actor_rollout_ref.actor.strategy decides"


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer."""

    lr: float = Field(default=1e-5, ge=0, description="Peak learning rate (of AdamW).")


class CriticModelConfig(ModelConfig):
    """A critic's folder, or a language model's, whose head a value head then replaces."""

    path: str = Field(
        default="",
        description="Folder or hub name of a critic, or of the language model that it begins as; "
        "actor_rollout_ref.model.path if not set.",
    )
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )
    custom_chat_template: str | None = no_effect(
        None, "Chat template.", why="prompts are rendered once, for actor and critic"
    )
    rope_scaling: dict[str, Any] = no_effect(
        dict[str, Any], "Changes to the rotary embedding.", why=NOT_BUILT
    )
    tiled_mlp: dict[str, Any] = no_effect(
        dict[str, Any], "The feed-forward in tiles.", why=NOT_BUILT
    )


class CriticConfig(BaseModel):
    """The critic."""

    model_config = SECTION

    enable: bool | None = Field(
        default=None,
        description="Train a critic; null: if algorithm.adv_estimator is gae, which needs one.",
    )
    model: CriticModelConfig = Field(
        default_factory=CriticModelConfig, description="What the critic begins as."
    )
    optim: CriticOptimConfig = Field(
        default_factory=CriticOptimConfig, description="Optimizer and schedule."
    )
    ppo_mini_batch_size: int = Field(
        default=256,
        ge=1,
        description="Prompts per optimizer step; the actor's if not set, as the next six keys.",
    )
    ppo_epochs: int = Field(default=1, ge=1, description="Passes over each batch.")
    shuffle: bool = Field(
        default=False, description="Shuffle sequences before cutting mini-batches."
    )
    data_loader_seed: Seed = Field(default=42, ge=0, description="Seed of that shuffle.")
    loss_agg_mode: LossAggregation = Field(
        default="token-mean", description="How token losses become one number."
    )
    loss_scale_factor: float | None = Field(
        default=None,
        gt=0,
        description="Divisor of seq-mean-token-sum-norm; null takes data.max_response_length.",
    )
    use_dynamic_bsz: bool = Field(
        default=False, description="Fill micro-batches up to *_max_token_len_per_gpu tokens."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences of one forward and backward pass; null packs by tokens.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="Most tokens of a device in a micro-batch filled by tokens.",
    )
    forward_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="The same for values; ppo_micro_batch_size_per_gpu if not set.",
    )
    forward_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="The same for values; ppo_max_token_len_per_gpu if not set.",
    )
    cliprange_value: float = Field(
        default=0.5,
        gt=0,
        description="The loss does not reward values that have moved by more than this.",
    )

    strategy: str = no_effect("fsdp", "Back end.", why=_ACTORS_STRATEGY)
    rollout_n: int = no_effect(1, "Samples of a prompt.", why="actor_rollout_ref.rollout.n decides")
    megatron: MegatronConfig = no_effect(
        MegatronConfig, "Megatron's layout.", why="not built yet: strategy=megatron"
    )
    load_weight: bool = no_effect(
        True, "Load weights.", why="actor_rollout_ref.actor.load_weight decides for both models"
    )
    checkpoint: CheckpointConfig = no_effect(
        CheckpointConfig,
        "Parts of a checkpoint.",
        why="a checkpoint always holds weights, optimizer and schedule",
    )
    ppo_micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use ppo_micro_batch_size_per_gpu",
    )
    forward_micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch of values over all devices.",
        why="deprecated in verl; use forward_micro_batch_size_per_gpu",
    )
    nccl_timeout: int = no_effect(
        600, "Deadline of collectives.", why="actor_rollout_ref.nccl_timeout decides"
    )
    profiler: dict[str, Any] = no_effect(dict[str, Any], "Profiler of the critic.", why=NOT_BUILT)

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.use_dynamic_bsz or self.ppo_micro_batch_size_per_gpu is None
        return self.ppo_max_token_len_per_gpu if by_tokens else None

    @property
    def forward_tokens(self) -> int | None:
        """As ``microbatch_tokens``, for values."""
        by_tokens = self.use_dynamic_bsz or self.forward_micro_batch_size_per_gpu is None
        return self.forward_max_token_len_per_gpu if by_tokens else None
