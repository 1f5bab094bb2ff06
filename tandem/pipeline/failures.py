# SPDX-License-Identifier: Apache-2.0
"""Failures that do not end a run at once: rewards that fail, and updates that are not finite.

Failed rewards are logged here and counted in ``metrics``. Too many failures in a row end the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from tandem.agents.setup import ENVIRONMENT_LOG_FILE
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.rewards.log import REWARD_LOG_FILE
from tandem.types import EpisodeEnd, Group, RewardOutcome, RewardStatus, Sample, UpdateReport

logger = logging.getLogger(__name__)

MAX_STEPS_WITHOUT_UPDATE = 5
"""The number of training steps in a row without an optimizer step that ends the run."""

MAX_STEPS_OF_FAILURES = 3
"""The number of training steps in a row with more failed rewards than others that ends the run."""

GENERATION_FAILED = RewardOutcome(
    RewardStatus.ERROR, math.nan, detail="the generation failed: its logits are not finite"
)
"""The reward of a sample whose generation failed."""

_FAILED = (RewardStatus.ERROR, RewardStatus.TIMEOUT)

PENDING = RewardOutcome(RewardStatus.PENDING, math.nan)
"""The reward of a sample until a reward model has scored its batch."""


def warn_of_failed_rewards(groups: Sequence[Group], source: str) -> None:
    """Log one warning with the number of failed rewards and the cause of the first, if any failed.

    Args:
        source: the origin of the groups in words, such as ``step 3``.
    """
    outcomes = [sample.reward for group in groups for sample in group.samples]
    failed = [outcome for outcome in outcomes if outcome.status is not RewardStatus.VALUE]
    if failed:
        logger.warning(
            "%s: %d of %d rewards failed and do not count; the first: %s",
            source,
            len(failed),
            len(outcomes),
            failed[0].detail,
        )


def warn_of_failed_baseline(outcome: RewardOutcome) -> None:
    """Log a warning if the reward of a greedy answer (``remax``) failed."""
    if outcome.status in _FAILED:
        logger.warning(
            "the greedy baseline of a prompt failed, so its samples do not count: %s",
            outcome.detail,
        )


class StaleSampleError(RuntimeError):
    """A defect of the pipeline: a sample is too old for, or newer than, the weights it trains."""


def require_fresh(groups: Sequence[Group], *, version: int, max_lag: int) -> None:
    """Raise StaleSampleError unless ``version - max_lag`` to ``version`` drew every token."""
    for group in groups:
        for sample in group.samples:
            trajectory = sample.trajectory
            versions = [run[0] for drawn in trajectory.completions for run in drawn.version_runs]
            if min(versions) < version - max_lag or max(versions) > version:
                raise StaleSampleError(
                    f"sample {trajectory.sample_id} was drawn by the versions {versions} and "
                    f"cannot train version {version}; the largest lag allowed is {max_lag}"
                )


class RewardGuard:
    """A guard that ends a run whose rewards fail, because it would learn nothing.

    Rewards count in the order in which they are computed, ``size`` of them as a training step.

    Args:
        size: the number of rewards of a training step.
        config: the configuration, for the message.
    """

    def __init__(self, size: int, *, config: RunConfig) -> None:
        self._size = size
        self._config = config
        self._num_in_a_row = 0
        self._num_counted = self._num_failed = 0
        self._num_bad_steps = 0
        self._latest: Sample | None = None

    def check(self, samples: Iterable[Sample]) -> None:
        """Count rewards. Raise UserError if every reward of a step failed, or more than half of
        the rewards in each of ``MAX_STEPS_OF_FAILURES`` steps in a row.
        """
        for sample in samples:
            failed = sample.reward.status in _FAILED
            self._latest = sample if failed else self._latest
            self._num_in_a_row = self._num_in_a_row + 1 if failed else 0
            if self._num_in_a_row >= self._size:
                raise self._error(f"the last {self._size} rewards all failed")
            self._num_counted += 1
            self._num_failed += failed
            if self._num_counted < self._size:
                continue
            is_bad = 2 * self._num_failed > self._size
            self._num_bad_steps = self._num_bad_steps + 1 if is_bad else 0
            self._num_counted = self._num_failed = 0
            if self._num_bad_steps >= MAX_STEPS_OF_FAILURES:
                steps = f"each of {self._num_bad_steps} steps in a row"
                raise self._error(f"more than half of the rewards failed in {steps}")

    def _error(self, fault: str) -> UserError:
        config, latest = self._config, self._latest
        assert latest is not None, "a reward has failed"
        if latest.reward is GENERATION_FAILED:
            return UserError(
                "actor_rollout_ref.actor.optim.lr",
                config.actor_rollout_ref.actor.optim.lr,
                rule=f"{fault}, because logits were not finite",
                remedy="Lower it, or find another cause of the policy's divergence.",
            )
        rule = f"{fault}, the latest: {latest.reward.detail}"
        episode = latest.trajectory.episode
        if episode is not None and episode.end.is_fault:
            return self._error_of_episodes(rule, episode.end)
        log = config.trainer.run_folder / REWARD_LOG_FILE
        remedy = f"The traceback is in {log}. Repair the reward function, or install what it needs."
        functions = config.custom_reward_function.path
        if not functions:
            return UserError("data_source", rule=rule, remedy=remedy)
        return UserError("custom_reward_function.path", functions, rule=rule, remedy=remedy)

    def _error_of_episodes(self, rule: str, end: EpisodeEnd) -> UserError:
        key, agent = "actor_rollout_ref.rollout.agent", self._config.actor_rollout_ref.rollout.agent
        if end is EpisodeEnd.DEADLINE:
            remedy = "Raise it, or make tools and agents faster."
            return UserError(f"{key}.timeout_s", agent.timeout_s, rule=rule, remedy=remedy)
        log = self._config.trainer.run_folder / ENVIRONMENT_LOG_FILE
        remedy = f"Repair the tool or the agent; its output is in {log}."
        return UserError(key, rule=rule, remedy=remedy)


class DivergenceGuard:
    """A guard that ends a run in which no optimizer step has been possible for a while.

    Args:
        key: the configuration key of the learning rate, for the message.
        learning_rate: its value.
        model: the name of the trained model, for the message.
    """

    def __init__(self, key: str, learning_rate: float, *, model: str = "policy") -> None:
        self._key = key
        self._model = model
        self._learning_rate = learning_rate
        self._num_steps = 0

    def check(self, step: int, reports: Sequence[UpdateReport]) -> None:
        """Raise UserError if all updates of the last ``MAX_STEPS_WITHOUT_UPDATE`` were skipped."""
        if not all(report.skipped for report in reports):
            self._num_steps = 0
            return
        self._num_steps += 1
        logger.warning("step %d: loss or gradient was not finite, no update", step)
        if self._num_steps >= MAX_STEPS_WITHOUT_UPDATE:
            raise UserError(
                self._key,
                self._learning_rate,
                rule="loss or gradient was not finite in "
                f"{MAX_STEPS_WITHOUT_UPDATE} training steps in a row, up to step {step}",
                remedy=f"Lower it, or find another cause of the {self._model}'s divergence.",
            )
