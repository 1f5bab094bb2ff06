# SPDX-License-Identifier: Apache-2.0
"""``*.optim.*``: optimizer and learning-rate schedule, which advances once per training step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from tandem.config.schema.fields import NOT_BUILT, SECTION, no_effect

_MEGATRON = "a setting of Megatron's optimizer, which is not built yet"


def _optimizer_name(value: Any) -> Any:
    names = {"adam": "AdamW", "adamw": "AdamW", "muon": "Muon"}
    return names.get(value.lower(), value) if isinstance(value, str) else value


def _moments_name(value: Any) -> Any:
    return "bfloat16" if value == "bf16" else value


MomentsDtype = Annotated[Literal["auto", "bfloat16"], BeforeValidator(_moments_name)]
OptimizerName = Annotated[Literal["AdamW", "Muon"], BeforeValidator(_optimizer_name)]


class OptimConfig(BaseModel):
    """The actor's optimizer."""

    model_config = SECTION

    optimizer: OptimizerName = Field(
        default="AdamW",
        description="AdamW, or Muon for weight matrices (everything else stays with AdamW).",
    )
    lr: float = Field(default=1e-6, ge=0, description="Peak learning rate (of AdamW).")
    muon_lr: float = Field(
        default=1e-3, ge=0, description="Peak learning rate of the matrices that Muon updates."
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's moments."
    )
    moments_dtype: MomentsDtype = Field(
        default="auto",
        description="Precision in which AdamW's moments are kept; auto: that of the weights. "
        "bfloat16 rounds up or down at random, so that small changes add up.",
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(
        default=1.0,
        gt=0,
        description="Largest gradient norm; larger gradients are scaled down to it.",
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        default="constant", description="Shape of the learning rate after warm-up."
    )
    lr_warmup_steps: int = Field(
        default=-1,
        ge=-1,
        description="Training steps of linear warm-up; 0 or less leaves it to the ratio.",
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Warm-up as a share of all training steps."
    )
    total_training_steps: int = Field(
        default=-1, ge=-1, description="Length of the schedule in training steps; -1 is the run's."
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Lowest learning rate of cosine, as a share of the peak.",
    )
    num_cycles: float = Field(
        default=0.5, gt=0, description="Periods of the cosine; 0.5 falls once."
    )

    optimizer_impl: str = no_effect("torch.optim", "Module of the optimizer.", why=NOT_BUILT)
    override_optimizer_config: dict[str, Any] = no_effect(
        dict[str, Any], "Further arguments of the optimizer.", why=NOT_BUILT
    )
    lr_warmup_init: float = no_effect(0.0, "First rate of warm-up.", why=_MEGATRON)
    lr_decay_steps: int | None = no_effect(None, "Length of the decay.", why=_MEGATRON)
    lr_decay_style: str = no_effect("constant", "Shape of the decay.", why=_MEGATRON)
    min_lr: float = no_effect(0.0, "Lowest learning rate.", why=_MEGATRON)
