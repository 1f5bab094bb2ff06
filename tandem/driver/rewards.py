# SPDX-License-Identifier: Apache-2.0
"""The rewards of a run by its configuration: their check before the start, and their processes."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tandem.agents.setup import AGENTS_KEY
from tandem.children.code_jail import JailError, survey_protections
from tandem.children.environment import child_environment
from tandem.children.jail_trial import lost_protections
from tandem.config.schema.imports import PACKAGE_PREFIX, PICKLE_SUFFIX
from tandem.config.schema.run import RunConfig
from tandem.data.rendering import PromptEntry, PromptRow
from tandem.driver.execution import complete
from tandem.errors import UserError
from tandem.pipeline.episodes import episode_context
from tandem.pipeline.reward_phase import overlong_buffer
from tandem.rewards.custom import RewardFunction
from tandem.rewards.log import REWARD_LOG_FILE, LoggedRewards
from tandem.rewards.pool import RewardLimits, RewardPool, check_reward
from tandem.rewards.rate_limit import RateLimitedRewards, RateLimits
from tandem.rewards.routing import check_sources, runs_programs
from tandem.rewards.scoring import ENVIRONMENT_KEY, RewardSpec
from tandem.types import EpisodeEnd, EpisodeRecord, RewardOutcome, RewardRequest

logger = logging.getLogger(__name__)

_MEBIBYTE = 1 << 20


def check_rewards(config: RunConfig, entries: Sequence[PromptRow | PromptEntry]) -> None:
    """Raise UserError unless the built-in rules or the user's functions can score ``entries``.

    Functions are tried on the first entry: with its ground truth as the response, and if that
    fails, with an empty response. The result must have the numbers that the estimator and dynamic
    sampling read.
    """
    if not entries:
        return
    spec = reward_spec(config)
    if not spec.functions:
        sources = {entry.data_source for entry in entries}
        check_sources(sources)
        if runs_programs(sources):
            _warn_of_lost_protections()
        return
    first = entries[0]
    extra_info = first.extra_info
    if first.agent:
        extra_info = episode_context(extra_info, EpisodeRecord(EpisodeEnd.ANSWER))
    trials = [
        RewardRequest(
            first.data_source,
            response,
            first.ground_truth,
            extra_info,
            num_tokens=1,
            prompt=first.messages,
        )
        for response in (str(first.ground_truth), "")
    ]
    outcome = complete(lambda: check_reward(spec, _limits(config), trials=trials))
    if outcome is not None and not first.agent and not config.reward_model.enable:
        _require_numbers(config, outcome)


def _require_numbers(config: RunConfig, outcome: RewardOutcome) -> None:
    """Raise UserError unless an outcome has the numbers that keys of ``algorithm`` name."""
    algorithm, numbers = config.algorithm, ("score", *outcome.extra)
    wanted: list[tuple[str, str]] = []
    if algorithm.adv_estimator == "gdpo":
        wanted = [("algorithm.gdpo_reward_keys", name) for name in algorithm.gdpo_reward_keys]
    if algorithm.filter_groups.enable and algorithm.filter_groups.metric == "acc":
        wanted.append(("algorithm.filter_groups.metric", "acc"))
    for key, name in wanted:
        if name not in numbers:
            raise UserError(
                key,
                name,
                rule="the reward of the first row has no number of this name (it has: "
                f"{', '.join(numbers)})",
                remedy="Return it for every sample, or name another one.",
            )


def check_own_rewards(
    config: RunConfig,
    *,
    train: Sequence[PromptRow | PromptEntry],
    validation: Sequence[PromptRow | PromptEntry],
    gives_reward: Mapping[str, bool],
) -> None:
    """Raise UserError if a key of rewards has no effect, as agents give the reward of all rows.

    If they give that of some, warn of it.

    Args:
        gives_reward: the names of the user's agents, and whether each gives the reward itself.
    """
    partly: dict[str, set[str]] = {}
    for key, value, rows in _keys_of_rewards(config, train=train, validation=validation):
        own = {row.agent for row in rows if gives_reward.get(row.agent)}
        if own and all(row.agent in own for row in rows):
            raise UserError(
                key,
                value,
                rule="has no effect, as all rows are played by agents that give the reward "
                f"themselves ({', '.join(sorted(own))})",
                remedy=f"Leave it out, or set reward: function for them in {AGENTS_KEY}.",
            )
        if own:
            partly[key] = own
    if partly:
        names = ", ".join(sorted(set[str]().union(*partly.values())))
        logger.warning(
            "%s: no effect on rows of the agents %s, which give the reward themselves",
            ", ".join(partly),
            names,
        )


def _keys_of_rewards(
    config: RunConfig,
    *,
    train: Sequence[PromptRow | PromptEntry],
    validation: Sequence[PromptRow | PromptEntry],
) -> Iterator[tuple[str, object, Sequence[PromptRow | PromptEntry]]]:
    """Yield each key of rewards that is set, its value, and the rows that it is for."""
    by_model, rows = config.reward_model.enable, [*train, *validation]
    path = config.custom_reward_function.path
    if path:
        yield "custom_reward_function.path", path, validation if by_model else rows
    if by_model:
        yield "reward_model.enable", True, train
    if overlong_buffer(config) is not None:
        yield "reward_model.reward_kwargs.overlong_buffer_cfg.enable", True, rows


def _warn_of_lost_protections() -> None:
    """Say in one line what the kernel does not hold of programs that a reward runs."""
    try:
        lost = lost_protections(survey_protections())
    except JailError as error:
        logger.warning("programs that the reward runs have not been tried in a jail: %s", error)
        return
    if lost:
        could = ", ".join(one.promise for one in lost)
        logger.warning("programs that the reward runs could %s on this machine", could)


@asynccontextmanager
async def open_rewards(config: RunConfig) -> AsyncIterator[LoggedRewards]:
    """Yield the scorer of a run, whose processes end with the context."""
    log = config.trainer.run_folder / REWARD_LOG_FILE
    async with RewardPool(reward_spec(config), _limits(config, log=str(log))) as pool:
        yield LoggedRewards(_rate_limited(config, pool), log)


def reward_spec(config: RunConfig) -> RewardSpec:
    """Return the reward functions and the shaping of the reward."""
    custom = config.custom_reward_function
    weights = custom.weights or (1.0,) * len(custom.path)
    functions = tuple(
        RewardFunction(
            *_split(path, custom.name), weight=weight, reward_kwargs=custom.reward_kwargs
        )
        for path, weight in zip(custom.path, weights, strict=True)
    )
    is_batch = config.reward_model.reward_manager == "batch"
    return RewardSpec(functions, overlong=overlong_buffer(config), needs_batch=is_batch)


def _split(path: str, name: str) -> tuple[str, str]:
    """Return file or module and function of ``reward.py:f``; a dotted path keeps its function."""
    place, colon, function = path.rpartition(":")
    if not colon or not function.isidentifier():
        return path, name
    is_file = place.endswith((".py", PICKLE_SUFFIX)) or place.startswith(PACKAGE_PREFIX)
    return (place if is_file else path), function


def _limits(config: RunConfig, *, log: str | None = None) -> RewardLimits:
    reward = config.reward
    return RewardLimits(
        num_processes=reward.num_workers,
        deadline_s=reward.timeout_s,
        memory_limit_bytes=reward.memory_limit_mb * _MEBIBYTE,
        log=log,
        environment=child_environment(os.environ, reward.environment, key=ENVIRONMENT_KEY),
    )


def _rate_limited(config: RunConfig, pool: RewardPool) -> RewardPool | RateLimitedRewards:
    reward = config.reward
    if config.reward_model.reward_manager != "rate_limited":
        return pool
    limits = RateLimits(
        reward.max_concurrent,
        max_calls=reward.max_rpm,
        max_tokens=reward.max_tpm,
        tokens_per_call=reward.estimated_tokens_per_request,
    )
    return RateLimitedRewards(pool, limits)
