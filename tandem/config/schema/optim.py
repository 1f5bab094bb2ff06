# SPDX-License-Identifier: Apache-2.0
"""``*.optim.*``: the optimizer and its learning-rate schedule, which advances per training step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from tandem.config.schema.fields import SECTION, LearningRate, read_if


def _optimizer_name(value: Any) -> Any:
    names = {"adam": "Adam", "adamw": "AdamW", "muon": "Muon"}
    return names.get(value.lower(), value) if isinstance(value, str) else value


def _moments_name(value: Any) -> Any:
    return "bfloat16" if value == "bf16" else value


MomentsDtype = Annotated[Literal["auto", "bfloat16"], BeforeValidator(_moments_name)]
OptimizerName = Annotated[Literal["AdamW", "Adam", "Muon"], BeforeValidator(_optimizer_name)]


class OptimConfig(BaseModel):
    """The optimizer of the actor."""

    model_config = SECTION

    optimizer: OptimizerName = Field(
        default="AdamW",
        description="AdamW; Adam, whose weight decay is part of the gradient; or Muon: Muon for "
        "weight matrices and AdamW for all other weights.",
    )
    lr: LearningRate = 1e-6
    muon_lr: float = Field(
        default=1e-3,
        ge=0,
        le=1,
        description="Peak learning rate of the matrices that Muon updates.",
        json_schema_extra=read_if("optimizer=Muon"),
    )
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's moments."
    )
    moments_dtype: MomentsDtype = Field(
        default="auto",
        description="Precision of AdamW's moments. auto: the precision of the weights; bfloat16: "
        "with stochastic rounding, so that small changes add up.",
    )
    weight_decay: float = Field(default=0.01, ge=0, description="Weight decay.")
    clip_grad: float = Field(
        default=1.0,
        gt=0,
        description="Maximum gradient norm; a larger gradient is scaled down to it.",
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        default="constant", description="Shape of the learning rate after warm-up."
    )
    lr_warmup_steps: int = Field(
        default=-1,
        ge=-1,
        description="Number of training steps of linear warm-up. 0 or less: "
        "lr_warmup_steps_ratio decides.",
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Linear warm-up as a share of all training steps.",
        json_schema_extra=read_if("lr_warmup_steps<=0: lr_warmup_steps is set and replaces it"),
    )
    total_training_steps: int = Field(
        default=-1,
        ge=-1,
        description="Length of the schedule in training steps; -1: the length of the run.",
    )
    min_lr_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Final learning rate of the cosine schedule, as a share of the peak.",
        json_schema_extra=read_if("lr_scheduler_type=cosine"),
    )
    min_lr: float = Field(
        default=0.0,
        ge=0,
        description="Final learning rate of the cosine schedule. The larger of this and "
        "min_lr_ratio times the peak is taken; matrices that Muon updates have the same ratio.",
        json_schema_extra=read_if("lr_scheduler_type=cosine"),
    )
    num_cycles: float = Field(
        default=0.5,
        gt=0,
        description="Number of periods of the cosine; 0.5: it falls once.",
        json_schema_extra=read_if("lr_scheduler_type=cosine"),
    )

    @property
    def final_ratio(self) -> float:
        """The final learning rate of the cosine, as a share of the peak: min_lr / lr, or
        min_lr_ratio if that is larger.
        """
        absolute = self.min_lr / self.lr if self.lr > 0 else 0.0
        return max(self.min_lr_ratio, absolute)
