# SPDX-License-Identifier: Apache-2.0
"""``SftConfig``: the key tree of ``tandem sft``.

It is verl's ``sft_trainer``; ``aliases`` joins the old and the new spelling of its keys.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, model_validator

from tandem.config.schema.actor import CheckpointConfig, FsdpConfig, OptimConfig
from tandem.config.schema.data import CustomClassConfig, Truncation
from tandem.config.schema.fields import (
    ALWAYS_PACKED,
    NOT_BUILT,
    SECTION,
    Seed,
    StringGroups,
    Strings,
    follow,
    no_effect,
)
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.trainer import RayConfig, TrainerConfig

_RL_ONLY = "it belongs to reinforcement learning"


class MultiturnConfig(BaseModel):
    """``data.multiturn.*``: conversations, of which the assistant's turns carry loss."""

    model_config = SECTION

    enable: bool = Field(
        default=False, description="Rows are conversations, not prompt and response."
    )
    messages_key: str = Field(default="messages", description="Column of the conversation.")
    tools_key: str = no_effect("tools", "Column of tools.", why=NOT_BUILT)
    enable_thinking_key: str = no_effect(
        "enable_thinking", "Column of the thinking switch.", why=NOT_BUILT
    )


class SftDataConfig(BaseModel):
    """Demonstrations."""

    model_config = SECTION

    train_files: Strings = Field(
        default=("~/data/gsm8k/train.parquet",),
        description="Parquet, .jsonl or .json files of demonstrations, concatenated in order.",
    )
    val_files: Strings = Field(
        default=(), description="Files of validation rows; an empty list means no validation."
    )
    train_batch_size: int = Field(default=256, ge=1, description="Rows per optimizer step.")
    micro_batch_size_per_gpu: int | None = Field(
        default=4,
        ge=1,
        description="Most rows of one forward and backward pass; null packs by tokens.",
    )
    use_dynamic_bsz: bool = Field(
        default=False, description="Fill micro-batches up to max_token_len_per_gpu tokens."
    )
    max_token_len_per_gpu: int = Field(
        default=8192, ge=1, description="Most tokens of a device in a micro-batch filled by tokens."
    )
    prompt_key: str = Field(default="question", description="Column of the prompt.")
    response_key: str = Field(default="answer", description="Column of the response.")
    prompt_dict_keys: Strings = Field(
        default=(), description="Where the prompt stands inside that column, e.g. [question]."
    )
    response_dict_keys: Strings = Field(
        default=(), description="Where the response stands inside that column, e.g. [answer]."
    )
    multiturn: MultiturnConfig = Field(
        default_factory=MultiturnConfig, description="Rows as conversations."
    )
    max_length: int = Field(default=1024, ge=1, description="Longest row in tokens.")
    truncation: Truncation = Field(
        default="error",
        description="What happens to a longer row: error names it, left keeps the last tokens, "
        "right the first, middle the first half and the last half.",
    )
    train_max_samples: int = Field(
        default=-1, ge=-1, description="Use this many training rows; -1 is all."
    )
    val_max_samples: int = Field(
        default=-1, ge=-1, description="Use this many validation rows; -1 is all."
    )
    shuffle: bool = Field(default=True, description="Draw rows in a new random order each epoch.")
    seed: Seed = Field(default=1, ge=0, description="Seed of that order; null means 1.")
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Passed to the chat template."
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template in place of the tokenizer's, as model.custom_chat_template, "
        "which it replaces.",
    )

    micro_batch_size: int | None = no_effect(
        None,
        "Micro-batch over all devices.",
        why="deprecated in verl; use micro_batch_size_per_gpu",
    )
    pad_mode: str = no_effect("no_padding", "Padding.", why=ALWAYS_PACKED)
    ignore_input_ids_mismatch: bool = no_effect(
        False, "Tolerate templates that differ by turn.", why=NOT_BUILT
    )
    custom_cls: CustomClassConfig = no_effect(
        CustomClassConfig, "Data set class of the user.", why=NOT_BUILT
    )
    use_shm: bool = no_effect(
        False, "Copy data to shared memory.", why="files are read once, where they are"
    )

    @property
    def microbatch_tokens(self) -> int | None:
        """A device's most tokens of a micro-batch, None where those are bounded by count."""
        by_tokens = self.use_dynamic_bsz or self.micro_batch_size_per_gpu is None
        return self.max_token_len_per_gpu if by_tokens else None


class SftOptimConfig(OptimConfig):
    """``optim.*`` with the defaults of supervised fine-tuning."""

    lr: float = Field(default=1e-5, ge=0, description="Peak learning rate (of AdamW).")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay rates of AdamW's moments."
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.1, ge=0, le=1, description="Warm-up as a share of all training steps."
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        default="cosine", description="Shape of the learning rate after warm-up."
    )


class SftTrainerConfig(TrainerConfig):
    """``trainer.*`` with the defaults of supervised fine-tuning."""

    project_name: str = Field(
        default="gsm8k-sft", min_length=1, description="Project, for loggers."
    )
    experiment_name: str = Field(default="test", min_length=1, description="Run, for loggers.")
    total_epochs: int = Field(default=4, ge=1, description="Passes over the training rows.")
    val_before_train: bool = Field(default=False, description="Validate before the first step.")

    val_only: bool = no_effect(False, "Validate and stop.", why=_RL_ONLY)
    critic_warmup: int = no_effect(0, "Steps before the actor.", why=_RL_ONLY)
    log_val_generations: int = no_effect(0, "Samples shown.", why=_RL_ONLY)
    rollout_data_dir: str | None = no_effect(None, "Rollouts.", why=_RL_ONLY)
    validation_data_dir: str | None = no_effect(None, "Validation rollouts.", why=_RL_ONLY)
    separated_node_tasks: StringGroups = no_effect((), "Groups of tasks.", why=_RL_ONLY)
    separated_node_ratios: tuple[float, ...] = no_effect((), "Their shares.", why=_RL_ONLY)


class SftConfig(BaseModel):
    """Everything ``tandem sft`` can be told."""

    model_config = SECTION

    data: SftDataConfig = Field(default_factory=SftDataConfig, description="Demonstrations.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model.")
    engine: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )
    optim: SftOptimConfig = Field(
        default_factory=SftOptimConfig, description="Optimizer and schedule."
    )
    trainer: SftTrainerConfig = Field(default_factory=SftTrainerConfig, description="The run.")
    nccl_timeout: int = Field(
        default=600,
        ge=1,
        description="Deadline of collectives in seconds, of any library; a process that gives no "
        "sign of life for half of it has failed.",
    )
    ray_kwargs: RayConfig = Field(default_factory=RayConfig, description="Settings of Ray.")

    checkpoint: CheckpointConfig = no_effect(
        CheckpointConfig,
        "Parts of a checkpoint.",
        why="a checkpoint always holds weights, optimizer, schedule and data",
    )
    use_remove_padding: bool = no_effect(True, "Train without padding.", why=ALWAYS_PACKED)

    @property
    def chat_template(self) -> str | None:
        """``data.chat_template``, or ``model.custom_chat_template`` if that is null."""
        own = self.data.chat_template
        return self.model.custom_chat_template if own is None else own

    @model_validator(mode="before")
    @classmethod
    def _follow_seed(cls, values: dict[str, Any]) -> dict[str, Any]:
        return follow(values, {"data.seed": "trainer.seed"})
