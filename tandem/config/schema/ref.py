# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.ref.*``: the frozen reference policy, which only a KL term in the loss or in
the reward needs.
"""

from __future__ import annotations

from pydantic import Field

from tandem.config.schema.fields import Section
from tandem.config.schema.fsdp import FsdpConfig


class RefConfig(Section):
    """The reference policy."""

    log_prob_micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward pass. null: micro-batches are "
        "filled by tokens.",
    )
    log_prob_use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens. Not set: actor.use_dynamic_bsz.",
    )
    log_prob_max_token_len_per_gpu: int = Field(
        default=16384,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens. Not set: actor.ppo_max_token_len_per_gpu.",
    )
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig,
        description="Precision, sharding and offloading; a key that is not set follows "
        "actor.fsdp_config.",
    )
