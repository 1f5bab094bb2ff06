# SPDX-License-Identifier: Apache-2.0
"""``SftConfig``: all keys of ``tandem sft``, which are those of verl's ``sft_trainer``.

``aliases`` maps the older spellings of verl to the keys defined here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tandem.config.schema.data import DatasetConfig, PictureConfig, Truncation
from tandem.config.schema.fields import (
    VALIDATES,
    LearningRate,
    MaxTrainRows,
    MaxValidationRows,
    Section,
    Shuffles,
    ShuffleSeed,
    Strings,
    follow,
    read_if,
)
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.optim import OptimConfig
from tandem.config.schema.trainer import RayConfig, TrainerConfig


def _thinking(value: Any) -> Any:
    return None if value == "none" else value  # verl's default is this text


Thinking = Annotated[bool | None, BeforeValidator(_thinking)]

_READS_COLUMNS = "multiturn.enable=False: data.multiturn.enable=True reads conversations"


class MultiturnConfig(Section):
    """``data.multiturn.*``: rows that are conversations; the turns of the assistant carry loss."""

    enable: bool = Field(
        default=False, description="Rows are conversations instead of prompt and response."
    )
    messages_key: str = Field(
        default="messages",
        description="Column of the conversation.",
        json_schema_extra=read_if("enable=True"),
    )
    tools_key: str = Field(
        default="tools",
        description="Column of the tools of a conversation, which the chat template gets. A row "
        "may lack it.",
        json_schema_extra=read_if("enable=True"),
    )
    enable_thinking_key: str = Field(
        default="enable_thinking",
        description="Column of the chat template's argument enable_thinking. A row may lack it.",
        json_schema_extra=read_if("enable=True"),
    )
    enable_thinking_default: Thinking = Field(
        default=None,
        description="enable_thinking of rows without that column. null: the template decides.",
        json_schema_extra=read_if("enable=True"),
    )


class SftDataConfig(Section):
    """The rows to learn from."""

    train_files: Strings = Field(
        default=("~/data/gsm8k/train.parquet",),
        description="Parquet, .jsonl or .json files of demonstrations, concatenated in order.",
    )
    val_files: Strings = Field(
        default=(), description="Files of validation rows. An empty list: no validation."
    )
    train_batch_size: int = Field(
        default=256, ge=1, description="Number of rows per optimizer step."
    )
    micro_batch_size_per_gpu: int | None = Field(
        default=4,
        ge=1,
        description="Maximum number of rows per forward and backward pass. null: micro-batches "
        "are filled by tokens.",
    )
    use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches up to max_token_len_per_gpu tokens instead of counting "
        "rows.",
    )
    max_token_len_per_gpu: int = Field(
        default=8192,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens.",
    )
    prompt_key: str = Field(
        default="question",
        description="Column of the prompt.",
        json_schema_extra=read_if(_READS_COLUMNS),
    )
    response_key: str = Field(
        default="answer",
        description="Column of the response.",
        json_schema_extra=read_if(_READS_COLUMNS),
    )
    prompt_dict_keys: Strings = Field(
        default=(),
        description="Path of the prompt inside its column, e.g. [question].",
        json_schema_extra=read_if(_READS_COLUMNS),
    )
    response_dict_keys: Strings = Field(
        default=(),
        description="Path of the response inside its column, e.g. [answer].",
        json_schema_extra=read_if(_READS_COLUMNS),
    )
    multiturn: MultiturnConfig = Field(
        default_factory=MultiturnConfig, description="Rows as conversations."
    )
    image_key: str = Field(
        default="images",
        description="Column of the pictures, for models that see. Each stands at a mark <image> of "
        "the prompt or of the conversation.",
    )
    mm_processor_kwargs: PictureConfig = Field(
        default_factory=PictureConfig, description="Sizes of pictures."
    )
    max_length: int = Field(default=1024, ge=1, description="Maximum length of a row in tokens.")
    truncation: Truncation = Field(
        default="error",
        description="Treatment of a row that is longer than max_length. error: an error that names "
        "the row; left: keep the last tokens; right: keep the first tokens; middle: keep the first "
        "half and the last half.",
    )
    train_max_samples: MaxTrainRows = -1
    val_max_samples: MaxValidationRows = -1
    shuffle: Shuffles = True
    seed: ShuffleSeed = 1
    custom_cls: DatasetConfig = Field(
        default_factory=DatasetConfig, description="A data set of the user."
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Keyword arguments of the chat template."
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template that replaces the tokenizer's. It takes precedence over "
        "model.custom_chat_template.",
    )


class SftOptimConfig(OptimConfig):
    """``optim.*`` with the defaults of supervised fine-tuning."""

    lr: LearningRate = 1e-5
    betas: tuple[float, float] = Field(
        default=(0.9, 0.95), description="Decay rates of AdamW's moments."
    )
    lr_warmup_steps_ratio: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Linear warm-up as a share of all training steps.",
        json_schema_extra=read_if("lr_warmup_steps<=0: lr_warmup_steps is set and replaces it"),
    )
    lr_scheduler_type: Literal["constant", "cosine"] = Field(
        default="cosine", description="Shape of the learning rate after warm-up."
    )


class SftTrainerConfig(TrainerConfig):
    """``trainer.*`` with the defaults of supervised fine-tuning."""

    project_name: str = Field(
        default="gsm8k-sft", min_length=1, description="Name of the project, for loggers."
    )
    experiment_name: str = Field(
        default="test", min_length=1, description="Name of the run, for loggers."
    )
    total_epochs: int = Field(
        default=4, ge=1, description="Number of passes over the training rows."
    )
    val_before_train: bool = Field(
        default=False,
        description="Validate before the first step.",
        json_schema_extra=read_if(VALIDATES),
    )


class SftConfig(Section):
    """The configuration of ``tandem sft``."""

    data: SftDataConfig = Field(
        default_factory=SftDataConfig, description="The rows to learn from."
    )
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
        description="Timeout of collectives in seconds, for any communication library. A process "
        "that sends no heartbeat for half of that time counts as failed.",
    )
    ray_kwargs: RayConfig = Field(default_factory=RayConfig, description="Settings of Ray.")

    @property
    def sequences_per_step(self) -> int:
        """``data.train_batch_size``."""
        return self.data.train_batch_size

    @property
    def optimizer_steps_per_step(self) -> int:
        """1: a batch is one mini-batch, which is trained on once."""
        return 1

    @property
    def chat_template(self) -> str | None:
        """``data.chat_template``, or ``model.custom_chat_template`` if that is null."""
        own = self.data.chat_template
        return self.model.custom_chat_template if own is None else own

    @model_validator(mode="before")
    @classmethod
    def _follow_seed(cls, values: dict[str, Any]) -> dict[str, Any]:
        return follow(values, {"data.seed": "trainer.seed"})
