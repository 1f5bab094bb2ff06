# SPDX-License-Identifier: Apache-2.0
"""``actor_rollout_ref.model.*``: which model, and how it is held in memory."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import ALWAYS_PACKED, NOT_BUILT, SECTION, Strings, no_effect

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

    use_remove_padding: bool = no_effect(True, "Train without padding.", why=ALWAYS_PACKED)
    tokenizer_path: str | None = no_effect(
        None, "Tokenizer of its own.", why="not built yet: the tokenizer is that of model.path"
    )
    hf_config_path: str | None = no_effect(
        None,
        "Model configuration of its own.",
        why="not built yet: config.json is that of model.path",
    )
    override_config: dict[str, Any] = no_effect(
        dict[str, Any], "Changes to the model's config.json.", why=NOT_BUILT
    )
    external_lib: str | None = no_effect(None, "Package imported before the model.", why=NOT_BUILT)
    use_shm: bool = no_effect(
        False, "Copy the model to shared memory.", why="weights are mapped from their files"
    )
    enable_activation_offload: bool = no_effect(
        False, "Keep activations on the CPU.", why=NOT_BUILT
    )
    use_liger: bool = no_effect(False, "Liger kernels.", why=_FUSED)
    use_fused_kernels: bool = no_effect(False, "Fused log-probs.", why=_FUSED)
    fused_kernel_options: dict[str, Any] = no_effect(
        dict[str, Any], "Back end of fused log-probs.", why=_FUSED
    )
    lora_rank: int = no_effect(0, "Rank of LoRA; 0 trains all weights.", why=_LORA, ge=0)
    lora_alpha: float = no_effect(16, "Scale of LoRA.", why=_LORA)
    lora_adapter_path: str | None = no_effect(None, "Adapter to start from.", why=_LORA)
    target_modules: Strings = no_effect(("all-linear",), "Modules with LoRA.", why=_LORA)
    exclude_modules: Strings = no_effect((), "Modules without LoRA.", why=_LORA)
