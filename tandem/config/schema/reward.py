# SPDX-License-Identifier: Apache-2.0
"""``reward.*``, ``custom_reward_function.*`` and the settings of reward managers: how responses are
scored by rules and functions. By a model: ``reward_model``.

verl has moved these keys more than once; ``aliases`` maps every spelling to the one defined here.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from tandem.config.schema.fields import SECTION


class RewardConfig(BaseModel):
    """The processes in which rewards are computed."""

    model_config = SECTION

    num_workers: int = Field(default=2, ge=1, description="Reward processes.")
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest computation of one reward, in seconds; then it has no value.",
    )
    memory_limit_mb: int = Field(
        default=1024, ge=64, description="Memory of one reward process, MiB."
    )


class OverlongBufferConfig(BaseModel):
    """``overlong_buffer_cfg.*``: DAPO's soft penalty of long responses."""

    model_config = SECTION

    enable: bool = Field(
        default=False, description="Penalise responses that end within the buffer."
    )
    len: int = Field(
        default=0, ge=0, description="Length of the buffer in tokens, before the limit."
    )
    penalty_factor: float = Field(default=1.0, ge=0, description="Penalty at the limit.")
    log: bool = Field(
        default=False, description="Report the penalty as overlong_reward and overlong."
    )


class RewardKwargs(BaseModel):
    """``reward_kwargs.*`` of the reward manager."""

    model_config = SECTION

    overlong_buffer_cfg: OverlongBufferConfig = Field(
        default_factory=OverlongBufferConfig, description="Penalty of long responses."
    )
    max_resp_len: int | None = Field(
        default=None,
        ge=1,
        description="Limit the buffer ends at; null takes data.max_response_length.",
    )


class SandboxFusionConfig(BaseModel):
    """``sandbox_fusion.*``: a code sandbox service."""

    model_config = SECTION

    url: str | None = Field(default=None, description="Address.")
    max_concurrent: int = Field(default=64, description="Most requests at once.")
    memory_limit_mb: int = Field(default=1024, description="Memory of one run, MiB.")


class CustomRewardConfig(BaseModel):
    """A reward function of the user: ``f(data_source, solution_str, ground_truth, extra_info)``."""

    model_config = SECTION

    path: str | None = Field(default=None, description="Python file that holds the function.")
    name: str = Field(default="compute_score", description="Name of the function.")
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Further keyword arguments of the function."
    )
