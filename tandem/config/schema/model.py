# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.model.*``: the model folder, its adapters, and the recomputation of
activations.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION, ModuleRule, Section, read_if

RecomputeGranularity = Literal["full", "feed_forward", "pointwise"]


class OverrideConfig(Section):
    """``override_config.*``: values that replace those of the model's config.json."""

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
        description="Recompute activations in the backward pass: less memory, more time. Not set, "
        "on accelerators of one kind: chosen to fit their memory.",
    )
    recompute_granularity: RecomputeGranularity = Field(
        default="full",
        description="Part of a layer that enable_gradient_checkpointing recomputes. pointwise: "
        "norms and activation function; feed_forward: also the first matrix product of the "
        "feed-forward block (of experts: both); full: the whole layer.",
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
        default=0,
        ge=0,
        description="Rank of the adapters (LoRA) that are trained instead of the weights. 0: the "
        "adapters of lora_adapter_path if that is set, else all weights.",
    )
    lora_alpha: float = Field(
        default=16,
        ge=0,
        description="Numerator of the factor of the adapters: lora_alpha / lora_rank.",
    )
    target_modules: ModuleRule = Field(
        default="all-linear",
        description="Linear maps of the layers that get adapters. all-linear: all; a list of last "
        "parts of names, e.g. [q_proj,v_proj]; or a regular expression that matches whole names.",
    )
    exclude_modules: ModuleRule | None = Field(
        default=None,
        description="Maps that get no adapters although target_modules matches them, in the same "
        "form.",
    )
    lora_adapter_path: str | None = Field(
        default=None,
        description="Folder of an adapter to start from, as peft saves it. Rank, alpha and target "
        "modules are those of the folder.",
    )

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.lora_adapter_path is not None
