# SPDX-License-Identifier: Apache-2.0
"""``reward.*``, ``custom_reward_function.*`` and ``reward_kwargs.*``: rewards by rules and
functions.

verl has moved these keys more than once; ``aliases`` maps every spelling to the one defined here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION, read_if


class RewardConfig(BaseModel):
    """The processes that compute rewards."""

    model_config = SECTION

    num_workers: int = Field(default=2, ge=1, description="Number of reward processes.")
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit of one reward in seconds; a reward that takes longer fails.",
    )
    memory_limit_mb: int = Field(
        default=1024, ge=64, description="Memory limit of one reward process in MiB."
    )


class OverlongBufferConfig(BaseModel):
    """``overlong_buffer_cfg.*``: DAPO's soft penalty on long responses."""

    model_config = SECTION

    enable: bool = Field(
        default=False, description="Penalize responses that end within the buffer."
    )
    len: int = Field(
        default=0,
        ge=0,
        description="Length of the buffer in tokens; it ends at max_resp_len.",
        json_schema_extra=read_if("enable=True"),
    )
    penalty_factor: float = Field(
        default=1.0,
        ge=0,
        description="Penalty of a response that ends at max_resp_len.",
        json_schema_extra=read_if("enable=True"),
    )
    log: bool = Field(
        default=False,
        description="Report the penalty as the metrics overlong_reward and overlong.",
        json_schema_extra=read_if("enable=True"),
    )


class RewardKwargs(BaseModel):
    """``reward_kwargs.*`` of the reward manager."""

    model_config = SECTION

    overlong_buffer_cfg: OverlongBufferConfig = Field(
        default_factory=OverlongBufferConfig,
        description="Penalty on long responses.",
        json_schema_extra=read_if("reward_model.reward_manager=dapo"),
    )
    max_resp_len: int | None = Field(
        default=None,
        ge=1,
        description="Response length at which the buffer ends. null: data.max_response_length.",
        json_schema_extra=read_if("overlong_buffer_cfg.enable=True"),
    )


class CustomRewardConfig(BaseModel):
    """A user's reward function: ``f(data_source, solution_str, ground_truth, extra_info)``."""

    model_config = SECTION

    path: str | None = Field(default=None, description="Python file that defines the function.")
    name: str = Field(
        default="compute_score",
        description="Name of the function.",
        json_schema_extra=read_if("path!=null"),
    )
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional keyword arguments of the function.",
        json_schema_extra=read_if("path!=null"),
    )
