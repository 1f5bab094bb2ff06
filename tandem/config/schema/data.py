# SPDX-License-Identifier: Apache-2.0
"""``data.*``: the files of prompts, and how prompts are rendered and batched."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tandem.config.schema.fields import (
    MaxTrainRows,
    MaxValidationRows,
    Section,
    Shuffles,
    ShuffleSeed,
    Strings,
    read_if,
)

Truncation = Literal["error", "left", "right", "middle"]


class DatasetConfig(Section):
    """``data.custom_cls.*``: a class or function of the user that reads the rows."""

    path: str | None = Field(
        default=None,
        description="Python file, pkg://module, or package.module:name of a class or function that "
        "reads the rows of train_files and val_files (docs/extend/dataset.md). null: tandem reads "
        "them.",
    )
    name: str | None = Field(
        default=None,
        description="Name of the class or function in that file or module.",
        json_schema_extra=read_if("path!=null"),
    )


class PictureConfig(Section):
    """``data.mm_processor_kwargs.*``: the sizes of pictures that the model reads."""

    min_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Smallest number of pixels of a picture after resizing. null: that of the "
        "model's preprocessor_config.json.",
    )
    max_pixels: int | None = Field(
        default=None,
        ge=1,
        description="Largest number of pixels of a picture after resizing. null: that of the "
        "model's preprocessor_config.json.",
    )


class DataConfig(Section):
    """Prompts for training and validation."""

    train_files: Strings = Field(
        default=("~/data/rlhf/gsm8k/train.parquet",),
        description="Parquet, .jsonl or .json files of training prompts, concatenated in order.",
    )
    val_files: Strings = Field(
        default=("~/data/rlhf/gsm8k/test.parquet",),
        description="Files of validation prompts. An empty list: no validation.",
    )
    train_batch_size: int = Field(
        default=1024,
        ge=0,
        description="Number of prompts per training step; the number of sequences is this times "
        "rollout.n. 0: async_training.* gives it.",
    )
    max_prompt_length: int = Field(
        default=512, ge=1, description="Maximum length of a prompt in tokens."
    )
    max_response_length: int = Field(
        default=512,
        ge=1,
        description="Maximum number of tokens generated per sample, in training and validation.",
    )
    filter_overlong_prompts: bool = Field(
        default=False, description="Drop rows whose rendered prompt exceeds max_prompt_length."
    )
    truncation: Truncation = Field(
        default="error",
        description="Treatment of a prompt that is longer than max_prompt_length. error: an "
        "error that names the row; left: keep the last tokens; right: keep the first tokens; "
        "middle: keep the first half and the last half.",
        json_schema_extra=read_if(
            "filter_overlong_prompts=False: data.filter_overlong_prompts=True drops longer prompts "
            "before they could be truncated"
        ),
    )
    shuffle: Shuffles = True
    seed: ShuffleSeed = 1
    prompt_key: str = Field(
        default="prompt", description="Column of the prompt (a list of messages)."
    )
    image_key: str = Field(
        default="images",
        description="Column of the pictures, for models that see. Each stands at a mark <image> of "
        "the prompt.",
    )
    mm_processor_kwargs: PictureConfig = Field(
        default_factory=PictureConfig, description="Sizes of pictures."
    )
    reward_fn_key: str = Field(
        default="data_source",
        description="Column that selects the reward function and groups validation metrics.",
    )
    train_max_samples: MaxTrainRows = -1
    val_max_samples: MaxValidationRows = -1
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Keyword arguments of the chat template."
    )
    custom_cls: DatasetConfig = Field(
        default_factory=DatasetConfig, description="A data set of the user."
    )

    gen_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Number of prompts in a batch that filter_groups.max_num_gen_batches counts. "
        "null: train_batch_size. It does not change the number of prompts drawn.",
        json_schema_extra=read_if(
            "algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches>0"
        ),
    )
