# SPDX-License-Identifier: Apache-2.0
"""``reward.*``, ``custom_reward_function.*`` and ``reward_kwargs.*``: rewards by rules and
functions.

verl has moved these keys more than once; ``aliases`` maps every spelling to the one defined here.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tandem.config.schema.fields import Section, Strings, read_if

_RATE_LIMITED = "reward_model.reward_manager=rate_limited"

_FUNCTION = "compute_score"


class RewardConfig(Section):
    """The processes that compute rewards."""

    num_workers: int = Field(default=2, ge=1, description="Number of reward processes.")
    timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Time limit of one call of a reward function in seconds; one that takes longer "
        "fails.",
    )
    memory_limit_mb: int = Field(
        default=1024, ge=64, description="Memory limit of one reward process in MiB."
    )
    environment: Strings = Field(
        default=(),
        description="Names of environment variables that reward functions may read besides the "
        "usual ones (docs/rewards.md), such as the key of a service; * stands for any characters.",
        json_schema_extra=read_if("custom_reward_function.path!=[]"),
    )
    max_concurrent: int = Field(
        default=1,
        ge=1,
        description="Maximum number of calls of the reward functions under way.",
        json_schema_extra=read_if(_RATE_LIMITED),
    )
    max_rpm: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of calls per minute. null: no limit.",
        json_schema_extra=read_if(_RATE_LIMITED),
    )
    max_tpm: int | None = Field(
        default=None,
        ge=1,
        description="Maximum number of tokens per minute, at estimated_tokens_per_request a call. "
        "null: no limit.",
        json_schema_extra=read_if(_RATE_LIMITED),
    )
    estimated_tokens_per_request: int = Field(
        default=2000,
        ge=1,
        description="Tokens that one call counts for max_tpm.",
        json_schema_extra=read_if("max_tpm!=null", _RATE_LIMITED),
    )


class OverlongBufferConfig(Section):
    """``overlong_buffer_cfg.*``: DAPO's soft penalty on long responses."""

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


class RewardKwargs(Section):
    """``reward_kwargs.*`` of the reward manager."""

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


def _function_name(value: Any) -> Any:
    return _FUNCTION if value is None else value


class CustomRewardConfig(Section):
    """The user's reward functions; docs/rewards.md has their signatures."""

    path: Strings = Field(
        default=(),
        description="Python file that defines the function, or a list of several: "
        "[a.py:correct,b.py:format]. Also pkg://package.module and package.module:function.",
    )
    name: Annotated[str, BeforeValidator(_function_name)] = Field(
        default=_FUNCTION,
        description="Name of the function in each file that is given without one. null: "
        "compute_score.",
        json_schema_extra=read_if("path!=[]"),
    )
    weights: tuple[float, ...] = Field(
        default=(),
        description="Weight of each function in the score, in the order of path. []: 1 for each.",
        json_schema_extra=read_if("path!=[]"),
    )
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional keyword arguments of the functions. Of several functions, each "
        "gets those that it takes.",
        json_schema_extra=read_if("path!=[]"),
    )
