# SPDX-License-Identifier: Apache-2.0
"""``data.*``: where prompts come from and how they are batched. Reads nothing itself."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from tandem.config.schema.fields import NOT_BUILT, SECTION, Seed, Strings, no_effect

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
    val_batch_size: int | None = no_effect(
        None, "Prompts per validation batch.", why="the whole validation set is generated in one go"
    )
    filter_overlong_prompts_workers: int = no_effect(
        1,
        "Processes that filter prompts.",
        why="the tokenizer filters in one batch with its own threads",
        ge=1,
    )
    validation_shuffle: bool = no_effect(
        False,
        "Shuffle validation rows.",
        why="validation metrics do not depend on the order of the rows",
    )
    dataloader_num_workers: int = no_effect(8, "Data loader processes.", why=_NO_DATALOADER)
    return_raw_input_ids: bool = no_effect(False, "Keep raw ids.", why=_NO_DATALOADER)
    return_raw_chat: bool = no_effect(True, "Keep messages.", why=_NO_DATALOADER)
    return_full_prompt: bool = no_effect(False, "Keep the rendered prompt.", why=_NO_DATALOADER)
    return_multi_modal_inputs: bool = no_effect(True, "Keep image inputs.", why=_TEXT_ONLY)
    image_key: str = no_effect("images", "Column of images.", why=_TEXT_ONLY)
    video_key: str = no_effect("videos", "Column of videos.", why=_TEXT_ONLY)
    trust_remote_code: bool = no_effect(
        False,
        "Run tokenizer code of the hub.",
        why="actor_rollout_ref.model.trust_remote_code decides",
    )
    tokenizer: str | None = no_effect(
        None, "Tokenizer of its own.", why="the tokenizer is that of actor_rollout_ref.model.path"
    )
    tool_config_path: str | None = no_effect(
        None, "Tools offered in the prompt.", why="not built yet: multi-turn rollouts with tools"
    )
    use_shm: bool = no_effect(
        False, "Copy data to shared memory.", why="files are read once, where they are"
    )
    custom_cls: CustomClassConfig = no_effect(
        CustomClassConfig, "Data set class of the user.", why=NOT_BUILT
    )
    sampler: CustomClassConfig = no_effect(
        CustomClassConfig, "Sampler class of the user.", why=NOT_BUILT
    )
    datagen: CustomClassConfig = no_effect(
        CustomClassConfig, "Data generator class of the user.", why=NOT_BUILT
    )
