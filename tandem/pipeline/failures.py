# SPDX-License-Identifier: Apache-2.0
"""What goes wrong without ending a run at once: rewards that fail, updates that are not finite.

Failed rewards are said on the console; what they are counted as is ``metrics``'s business.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence

from tandem.errors import UserError
from tandem.types import Group, RewardOutcome, RewardStatus, UpdateReport

logger = logging.getLogger(__name__)

MAX_STEPS_WITHOUT_UPDATE = 5
"""So many training steps in a row with every optimizer step skipped end the run."""

MAX_STEPS_WITHOUT_REWARD = 5
"""So many training steps' worth of rewards in a row that all failed end the run."""

GENERATION_FAILED = RewardOutcome(
    RewardStatus.ERROR, math.nan, detail="the generation failed: its logits are not finite"
)
"""What a sample gets whose generation failed."""

_FAILED = (RewardStatus.ERROR, RewardStatus.TIMEOUT)

PENDING = RewardOutcome(RewardStatus.PENDING, math.nan)
"""What a sample has until a reward model has scored its batch."""


def warn_of_failed_rewards(groups: Sequence[Group], what: str) -> None:
    """One warning with the number of failures and the cause of the first; none without failures.

    Args:
        what: the groups in words, such as ``step 3``.
    """
    outcomes = [sample.reward for group in groups for sample in group.samples]
    failed = [outcome for outcome in outcomes if outcome.status is not RewardStatus.VALUE]
    if failed:
        logger.warning(
            "%s: %d of %d rewards failed and do not count; the first: %s",
            what,
            len(failed),
            len(outcomes),
            failed[0].detail,
        )


def warn_of_failed_baseline(outcome: RewardOutcome) -> None:
    """One warning if the reward of a greedy answer (``remax``) has failed."""
    if outcome.status in _FAILED:
        logger.warning(
            "the greedy baseline of a prompt failed, so its samples do not count: %s",
            outcome.detail,
        )


class StaleSampleError(RuntimeError):
    """A token is older than ``trainer.generate_ahead_steps`` allows, or newer than the weights it
    is for: a fault of the pipeline.
    """


def require_fresh(groups: Sequence[Group], *, version: int, max_lag: int) -> None:
    """Raise StaleSampleError if the weights ``version`` have no use for a token of ``groups``."""
    for group in groups:
        for sample in group.samples:
            trajectory = sample.trajectory
            versions = [run[0] for drawn in trajectory.completions for run in drawn.version_runs]
            if min(versions) < version - max_lag or max(versions) > version:
                raise StaleSampleError(
                    f"sample {trajectory.sample_id} was drawn by the versions {versions}, and "
                    f"{version} is to use it; the largest lag allowed is {max_lag}"
                )


class RewardGuard:
    """Ends a run whose rewards do nothing but fail: it would use up the data and learn nothing.

    Args:
        limit: how many failures in a row are too many.
        path: ``custom_reward_function.path``, for the message.
        learning_rate: for the message, if generations have failed.
    """

    def __init__(self, limit: int, *, path: str | None, learning_rate: float) -> None:
        self._limit = limit
        self._path = path
        self._learning_rate = learning_rate
        self._num_failures = 0

    def check(self, outcomes: Iterable[RewardOutcome]) -> None:
        """Count outcomes. Raises UserError if the last ``limit`` of them have all failed."""
        for outcome in outcomes:
            failed = outcome.status in _FAILED
            self._num_failures = self._num_failures + 1 if failed else 0
            if self._num_failures >= self._limit:
                raise self._error(outcome)

    def _error(self, latest: RewardOutcome) -> UserError:
        if latest is GENERATION_FAILED:
            return UserError(
                f"actor_rollout_ref.actor.optim.lr={self._learning_rate:g}: none of the last "
                f"{self._limit} samples counts, because logits were not finite. Lower it, or look "
                "for what else makes the policy diverge."
            )
        return UserError(
            f"custom_reward_function.path={self._path!r}: the last {self._limit} rewards "
            f"all failed, the latest: {latest.detail}. Mend the reward, or what it needs."
        )


class DivergenceGuard:
    """Ends a run in which no optimizer step has been possible for a while.

    Args:
        key: the configuration key of the learning rate, for the message.
        learning_rate: its value.
        model: what diverges, for the message.
    """

    def __init__(self, key: str, learning_rate: float, *, model: str = "policy") -> None:
        self._key = key
        self._model = model
        self._learning_rate = learning_rate
        self._num_steps = 0

    def check(self, step: int, reports: Sequence[UpdateReport]) -> None:
        """Raises UserError if all updates of ``step`` and of the steps before it were skipped."""
        if not all(report.skipped for report in reports):
            self._num_steps = 0
            return
        self._num_steps += 1
        logger.warning("step %d: loss or gradient was not finite, no update", step)
        if self._num_steps >= MAX_STEPS_WITHOUT_UPDATE:
            raise UserError(
                f"{self._key}={self._learning_rate:g}: loss or gradient was not finite in "
                f"{MAX_STEPS_WITHOUT_UPDATE} training steps in a row, up to step {step}. "
                f"Lower it, or look for what else makes the {self._model} diverge."
            )
