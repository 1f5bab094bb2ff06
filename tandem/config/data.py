# SPDX-License-Identifier: Apache-2.0
"""``data.*``: where prompts come from and how they are batched. Reads nothing itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.fields import NOT_BUILT, SECTION, Seed, Strings, no_effect

Truncation = Literal["error", "left", "right", "middle"]

_TEXT_ONLY = "not built yet: prompts are text only"
_NO_DATALOADER = "there is no data loader process: prompts are rendered once, before the first step"


class CustomClassConfig(BaseModel):
    """``data.custom_cls``, ``data.sampler`` and ``data.datagen``: classes of the user."""

    model_config = SECTION

    path: str | None = Field(default=None, description="Python file that holds the class.")
    name: str | None = Field(default=None, description="Name of the class.")
    class_path: str | None = Field(
        default=None, description="Python file that holds the sampler class."
    )
    class_name: str | None = Field(default=None, description="Name of the sampler class.")


class DataConfig(BaseModel):
    """Prompts for training and validation."""

    model_config = SECTION

    train_files: Strings = Field(
        default=("~/data/rlhf/gsm8k/train.parquet",),
        description="Parquet, .jsonl or .json files of training prompts, concatenated in order.",
    )
    val_files: Strings = Field(
        default=("~/data/rlhf/gsm8k/test.parquet",),
        description="Files of validation prompts; an empty list means no validation.",
    )
    train_batch_size: int = Field(
        default=1024, ge=1, description="Prompts per training step, before rollout.n."
    )
    max_prompt_length: int = Field(default=512, ge=1, description="Longest prompt in tokens.")
    max_response_length: int = Field(
        default=512,
        ge=1,
        description="Most tokens generated for a prompt, in training and validation.",
    )
    filter_overlong_prompts: bool = Field(
        default=False, description="Drop rows whose rendered prompt exceeds max_prompt_length."
    )
    truncation: Truncation = Field(
        default="error",
        description="What happens to a longer prompt: error names the row, left keeps the last "
        "tokens, right the first, middle the first half and the last half.",
    )
    shuffle: bool = Field(default=True, description="Draw rows in a new random order each epoch.")
    seed: Seed = Field(default=1, ge=0, description="Seed of that order; null means 1.")
    prompt_key: str = Field(
        default="prompt", description="Column of the prompt (a list of messages)."
    )
    reward_fn_key: str = Field(
        default="data_source",
        description="Column that routes the reward and groups validation metrics.",
    )
    train_max_samples: int = Field(
        default=-1, ge=-1, description="Use this many training rows; -1 is all."
    )
    val_max_samples: int = Field(
        default=-1, ge=-1, description="Use this many validation rows; -1 is all."
    )
    apply_chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Passed to the chat template."
    )

    gen_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompts of one of the batches that filter_groups.max_num_gen_batches counts; "
        "null takes train_batch_size. (Only as many are drawn as were dropped.)",
    )
    val_batch_size: int | None = Field(
        default=None,
        description="Prompts per validation batch.",
        json_schema_extra=no_effect("the whole validation set is generated in one go"),
    )
    filter_overlong_prompts_workers: int = Field(
        default=1,
        ge=1,
        description="Processes that filter prompts.",
        json_schema_extra=no_effect("the tokenizer filters in one batch with its own threads"),
    )
    validation_shuffle: bool = Field(
        default=False,
        description="Shuffle validation rows.",
        json_schema_extra=no_effect("validation metrics do not depend on the order of the rows"),
    )
    dataloader_num_workers: int = Field(
        default=8, description="Data loader processes.", json_schema_extra=no_effect(_NO_DATALOADER)
    )
    return_raw_input_ids: bool = Field(
        default=False, description="Keep raw ids.", json_schema_extra=no_effect(_NO_DATALOADER)
    )
    return_raw_chat: bool = Field(
        default=True, description="Keep messages.", json_schema_extra=no_effect(_NO_DATALOADER)
    )
    return_full_prompt: bool = Field(
        default=False,
        description="Keep the rendered prompt.",
        json_schema_extra=no_effect(_NO_DATALOADER),
    )
    return_multi_modal_inputs: bool = Field(
        default=True, description="Keep image inputs.", json_schema_extra=no_effect(_TEXT_ONLY)
    )
    image_key: str = Field(
        default="images", description="Column of images.", json_schema_extra=no_effect(_TEXT_ONLY)
    )
    video_key: str = Field(
        default="videos", description="Column of videos.", json_schema_extra=no_effect(_TEXT_ONLY)
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run tokenizer code of the hub.",
        json_schema_extra=no_effect("actor_rollout_ref.model.trust_remote_code decides"),
    )
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer of its own.",
        json_schema_extra=no_effect("the tokenizer is that of actor_rollout_ref.model.path"),
    )
    tool_config_path: str | None = Field(
        default=None,
        description="Tools offered in the prompt.",
        json_schema_extra=no_effect("not built yet: multi-turn rollouts with tools"),
    )
    use_shm: bool = Field(
        default=False,
        description="Copy data to shared memory.",
        json_schema_extra=no_effect("files are read once, where they are"),
    )
    custom_cls: CustomClassConfig = Field(
        default_factory=CustomClassConfig,
        description="Data set class of the user.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
    sampler: CustomClassConfig = Field(
        default_factory=CustomClassConfig,
        description="Sampler class of the user.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
    datagen: CustomClassConfig = Field(
        default_factory=CustomClassConfig,
        description="Data generator class of the user.",
        json_schema_extra=no_effect(NOT_BUILT),
    )
