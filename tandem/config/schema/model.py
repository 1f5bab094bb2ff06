# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.model.*``: the model folder, and the recomputation of activations."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION, read_if

RecomputeGranularity = Literal["full", "feed_forward", "pointwise"]


class OverrideConfig(BaseModel):
    """``override_config.*``: values that replace those of the model's config.json."""

    model_config = SECTION

    max_position_embeddings: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens that the model is made for: longer sequences are warned of. "
        "null: config.json says it. Only a model whose rotary positions are not scaled may have "
        "another number.",
    )


class ModelConfig(BaseModel):
    """A Hugging Face model, shared by actor, rollout, reference and tokenizer."""

    model_config = SECTION

    path: str = Field(
        default="",
        description="Model folder, or a name on the Hugging Face hub. Required for training.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run the model and tokenizer code that comes with the model."
    )
    enable_gradient_checkpointing: bool = Field(
        default=True,
        description="Recompute activations in the backward pass: less memory, more time.",
    )
    recompute_granularity: RecomputeGranularity = Field(
        default="full",
        description="Part of a layer that enable_gradient_checkpointing recomputes. pointwise: "
        "norms and activation function; feed_forward: also the first matrix product of the "
        "feed-forward block; full: the whole layer.",
        json_schema_extra=read_if(
            "enable_gradient_checkpointing=True: enable_gradient_checkpointing=False recomputes "
            "nothing"
        ),
    )
    custom_chat_template: str | None = Field(
        default=None,
        description="Chat template that replaces the tokenizer's: Jinja text, or a file *.jinja.",
    )
    override_config: OverrideConfig = Field(
        default_factory=OverrideConfig, description="Replacements of values of config.json."
    )
    lora_rank: int = Field(
        default=0, ge=0, description="Rank of LoRA, which is not built yet: must be 0."
    )
