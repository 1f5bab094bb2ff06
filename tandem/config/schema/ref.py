# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.ref.*``: the frozen reference policy.

It exists only if KL in the loss or in the reward needs it.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tandem.config.schema.fields import NOT_BUILT, SECTION, no_effect
from tandem.config.schema.fsdp import FrozenFsdpConfig, MegatronConfig

_FOLLOWS_ACTOR = "the reference is what the actor starts as; actor_rollout_ref.actor decides"


class RefConfig(BaseModel):
    """The reference policy."""

    model_config = SECTION

    log_prob_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Most sequences of one forward pass; null packs by tokens.",
    )
    log_prob_use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens; follows actor.use_dynamic_bsz if not set.",
    )
    log_prob_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="A device's most tokens of a micro-batch that is filled by tokens; follows "
        "actor.ppo_max_token_len_per_gpu if not set.",
    )

    strategy: str = no_effect("fsdp", "Back end.", why=_FOLLOWS_ACTOR)
    fsdp_config: FrozenFsdpConfig = Field(
        default_factory=FrozenFsdpConfig,
        description="Precision, sharding and offloading; what is not set is as "
        "actor.fsdp_config sets it.",
    )
    megatron: MegatronConfig = no_effect(
        MegatronConfig, "Megatron's layout.", why="not built yet: strategy=megatron"
    )
    log_prob_micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    )
    use_torch_compile: bool = no_effect(True, "Compile.", why=_FOLLOWS_ACTOR)
    load_weight: bool = no_effect(True, "Load weights.", why=_FOLLOWS_ACTOR)
    profiler: dict[str, Any] = no_effect(
        dict[str, Any], "Profiler of the reference.", why=NOT_BUILT
    )

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.log_prob_use_dynamic_bsz or self.log_prob_micro_batch_size_per_gpu is None
        return self.log_prob_max_token_len_per_gpu if by_tokens else None
