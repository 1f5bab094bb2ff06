# SPDX-License-Identifier: Apache-2.0
"""``reward_model.*``: a model that scores responses, and the managers of rules and functions.

The model lives on the devices of actor-train, laid out as its own keys say, and is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import NOT_BUILT, SECTION, no_effect
from tandem.config.schema.fsdp import FrozenFsdpConfig
from tandem.config.schema.model import ModelConfig, RecomputeGranularity
from tandem.config.schema.reward import RewardKwargs, SandboxFusionConfig

REWARD_MODEL_FOLLOWS: Mapping[str, str] = {
    "reward_model.use_dynamic_bsz": "critic.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    "reward_model.model.input_tokenizer": "actor_rollout_ref.model.path",
}
"""Keys that take the value of others if they are not set, as in verl."""

_FROZEN = "a reward model is not trained"
_BESIDE_ACTOR = "the reward model is on the devices of actor-train"


class ScoringModelConfig(ModelConfig):
    """A reward model's folder, and how it is told what to score."""

    path: str = Field(
        default="",
        description="Folder or hub name of a reward model: sequence or token classification with "
        "one label.",
    )
    input_tokenizer: str | None = Field(
        default=None,
        description="Whose tokens responses are, if not the reward model's own: the policy's "
        "(actor_rollout_ref.model.path, if not set). They then become text, and conversations are "
        "rendered and tokenised anew by the reward model's tokenizer. null: tokens are taken as "
        "they are.",
    )
    custom_chat_template: str | None = Field(
        default=None,
        description="Chat template in place of the reward model's: Jinja text, or a file *.jinja.",
    )
    fsdp_config: FrozenFsdpConfig = Field(
        default_factory=FrozenFsdpConfig, description="Precision, sharding and offloading."
    )
    enable_gradient_checkpointing: bool = no_effect(True, "Recompute activations.", why=_FROZEN)
    recompute_granularity: RecomputeGranularity = no_effect(
        "full", "What is recomputed.", why=_FROZEN
    )


class RewardModelConfig(BaseModel):
    """A reward model, and reward managers."""

    model_config = SECTION

    enable: bool = Field(
        default=False,
        description="Score training by a reward model, in place of rules and functions.",
    )
    model: ScoringModelConfig = Field(
        default_factory=ScoringModelConfig, description="The reward model."
    )
    micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences of one forward pass; null packs by tokens.",
    )
    use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens; follows critic.use_dynamic_bsz if not set.",
    )
    forward_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="A device's most tokens of a micro-batch that is filled by tokens; "
        "critic.forward_max_token_len_per_gpu if not set.",
    )
    reward_manager: Literal["naive", "dapo"] = Field(
        default="naive", description="naive, or dapo: with the overlong penalty."
    )
    reward_kwargs: RewardKwargs = Field(
        default_factory=RewardKwargs, description="Settings of the reward manager."
    )

    strategy: str = no_effect("fsdp", "Back end.", why="fsdp and fsdp2 are one engine")
    max_length: int | None = no_effect(
        None, "Longest sequence.", why="nothing is cut off: prompt and response are read whole"
    )
    enable_resource_pool: bool = no_effect(False, "Devices of its own.", why=_BESIDE_ACTOR)
    n_gpus_per_node: int = no_effect(0, "Devices per node.", why=_BESIDE_ACTOR)
    nnodes: int = no_effect(0, "Nodes.", why=_BESIDE_ACTOR)
    micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use micro_batch_size_per_gpu",
    )
    use_reward_loop: bool = no_effect(
        True, "verl's reward loop.", why="a batch is scored in one pass, before its advantages"
    )
    launch_reward_fn_async: bool = no_effect(
        False,
        "Score while training.",
        why="rewards are always computed as soon as a group is generated",
    )
    sandbox_fusion: SandboxFusionConfig = no_effect(
        SandboxFusionConfig,
        "Code sandbox service.",
        why="not built yet: reward code runs in local processes",
    )
    profiler: dict[str, Any] = no_effect(
        dict[str, Any], "Profiler of the reward model.", why=NOT_BUILT
    )

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.use_dynamic_bsz or self.micro_batch_size_per_gpu is None
        return self.forward_max_token_len_per_gpu if by_tokens else None
