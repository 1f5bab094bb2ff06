# SPDX-License-Identifier: Apache-2.0
"""``reward_model.*``: a model that scores responses, and the manager of rules and functions.

The model is on the devices of actor-train, has its own layout, and is never trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from tandem.config.schema.fields import TRAINS, Section, read_if
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.model import ModelConfig
from tandem.config.schema.reward import RewardKwargs

REWARD_MODEL_FOLLOWS: Mapping[str, str] = {
    "reward_model.use_dynamic_bsz": "critic.use_dynamic_bsz",
    "reward_model.forward_max_token_len_per_gpu": "critic.forward_max_token_len_per_gpu",
    "reward_model.model.input_tokenizer": "actor_rollout_ref.model.path",
}
"""Key -> the key that it follows if it is not set, as in verl."""


RewardManager = Literal["naive", "dapo", "batch", "rate_limited", "prime", "remote", "gdpo"]


class ScoringModelConfig(ModelConfig):
    """The folder of a reward model, and the tokens that it scores."""

    path: str = Field(
        default="",
        description="Folder or hub name of a reward model: sequence or token classification with "
        "one label.",
    )
    input_tokenizer: str | None = Field(
        default=None,
        description="Model whose tokenizer the responses come from. Not set: "
        "actor_rollout_ref.model.path; responses are decoded to text, and conversations are "
        "rendered and tokenized again for the reward model. null: the reward model has the same "
        "tokenizer and scores the tokens of the policy.",
    )
    custom_chat_template: str | None = Field(
        default=None,
        description="Chat template that replaces the reward model's: Jinja text, or a file "
        "*.jinja.",
        json_schema_extra=read_if(
            "input_tokenizer!=null: the reward model scores the tokens of the policy, as "
            "reward_model.model.input_tokenizer=null"
        ),
    )
    fsdp_config: FsdpConfig = Field(
        default_factory=FsdpConfig, description="Precision, sharding and offloading."
    )


class RewardModelConfig(Section):
    """A reward model, and the reward manager."""

    enable: bool = Field(
        default=False,
        description="Score training rollouts with a reward model instead of rules and functions.",
    )
    model: ScoringModelConfig = Field(
        default_factory=ScoringModelConfig,
        description="The reward model.",
        json_schema_extra=read_if("enable=True", TRAINS),
    )
    micro_batch_size_per_gpu: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of sequences per forward pass. null: micro-batches are "
        "filled by tokens.",
        json_schema_extra=read_if("enable=True"),
    )
    use_dynamic_bsz: bool = Field(
        default=False,
        description="Fill micro-batches by tokens. Not set: critic.use_dynamic_bsz.",
        json_schema_extra=read_if("enable=True"),
    )
    forward_max_token_len_per_gpu: int = Field(
        default=32768,
        ge=1,
        description="Maximum number of tokens per device in a micro-batch that is filled by "
        "tokens. Not set: critic.forward_max_token_len_per_gpu.",
        json_schema_extra=read_if("enable=True"),
    )
    reward_manager: RewardManager = Field(
        default="naive",
        description="dapo: with the penalty on overlong responses. batch: each function scores all "
        "responses to a prompt in one call. rate_limited: calls keep the limits reward.max_*. "
        "prime, remote, gdpo: the same as naive, because rewards run in limited processes, and "
        "their numbers reach the estimator.",
    )
    reward_kwargs: RewardKwargs = Field(
        default_factory=RewardKwargs, description="Settings of the reward manager."
    )
