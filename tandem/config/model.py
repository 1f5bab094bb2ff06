# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.model.*``: which model, and how it is held in memory."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.fields import ALWAYS_PACKED, NOT_BUILT, SECTION, Strings, no_effect

RecomputeGranularity = Literal["full", "feed_forward", "pointwise"]

_LORA = "not built yet: LoRA; all weights are trained"
_FUSED = "log-probs are always computed fused and in chunks"


class ModelConfig(BaseModel):
    """A Hugging Face model: actor, rollout, reference and tokenizer share it."""

    model_config = SECTION

    path: str = Field(
        default="",
        description="Model folder, or a name on the Hugging Face hub. Must be set for training.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run model and tokenizer code that comes with the model."
    )
    enable_gradient_checkpointing: bool = Field(
        default=True,
        description="Recompute activations in the backward pass: less memory, more time.",
    )
    recompute_granularity: RecomputeGranularity = Field(
        default="full",
        description="What enable_gradient_checkpointing recomputes, from little to all of a layer: "
        "pointwise: norms and activation; feed_forward: its first matrix product too; full.",
    )
    custom_chat_template: str | None = Field(
        default=None,
        description="Chat template in place of the tokenizer's: Jinja text, or a file *.jinja.",
    )

    use_remove_padding: bool = Field(
        default=True,
        description="Train without padding.",
        json_schema_extra=no_effect(ALWAYS_PACKED),
    )
    tokenizer_path: str | None = Field(
        default=None,
        description="Tokenizer of its own.",
        json_schema_extra=no_effect("not built yet: the tokenizer is that of model.path"),
    )
    hf_config_path: str | None = Field(
        default=None,
        description="Model configuration of its own.",
        json_schema_extra=no_effect("not built yet: config.json is that of model.path"),
    )
    override_config: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Changes to the model's config.json.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
    external_lib: str | None = Field(
        default=None,
        description="Package imported before the model.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
    use_shm: bool = Field(
        default=False,
        description="Copy the model to shared memory.",
        json_schema_extra=no_effect("weights are mapped from their files"),
    )
    enable_activation_offload: bool = Field(
        default=False,
        description="Keep activations on the CPU.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
    use_liger: bool = Field(
        default=False, description="Liger kernels.", json_schema_extra=no_effect(_FUSED)
    )
    use_fused_kernels: bool = Field(
        default=False, description="Fused log-probs.", json_schema_extra=no_effect(_FUSED)
    )
    fused_kernel_options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Back end of fused log-probs.",
        json_schema_extra=no_effect(_FUSED),
    )
    lora_rank: int = Field(
        default=0,
        ge=0,
        description="Rank of LoRA; 0 trains all weights.",
        json_schema_extra=no_effect(_LORA),
    )
    lora_alpha: float = Field(
        default=16, description="Scale of LoRA.", json_schema_extra=no_effect(_LORA)
    )
    lora_adapter_path: str | None = Field(
        default=None, description="Adapter to start from.", json_schema_extra=no_effect(_LORA)
    )
    target_modules: Strings = Field(
        default=("all-linear",),
        description="Modules with LoRA.",
        json_schema_extra=no_effect(_LORA),
    )
    exclude_modules: Strings = Field(
        default=(), description="Modules without LoRA.", json_schema_extra=no_effect(_LORA)
    )
