# SPDX-License-Identifier: Apache-2.0
"""Failed rewards are said aloud, with the cause of the first."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.pipeline.failures import (
    GENERATION_FAILED,
    PENDING,
    RewardGuard,
    StaleSampleError,
    require_fresh,
    warn_of_failed_rewards,
)
from tandem.types import (
    Completion,
    EpisodeEnd,
    EpisodeRecord,
    FinishReason,
    Group,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
)

GOOD = RewardOutcome(RewardStatus.VALUE, 1.0)
LATE = RewardOutcome(RewardStatus.TIMEOUT, math.nan, {}, "no result within 3 s")


def group(*outcomes: RewardOutcome) -> Group:
    completion = Completion(0, (1,), (-0.5,), FinishReason.STOP, 0)
    trajectory = Trajectory.of_single_turn((1,), completion)
    prompt = Prompt(0, 0, (1,), "", "source", "")
    return Group(prompt, tuple(Sample(trajectory, "", outcome) for outcome in outcomes))


def test_one_line_counts_failures_and_names_the_first(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_failed_rewards([group(GOOD, LATE), group(LATE, GOOD)], "step 3")
    (record,) = caplog.records
    assert record.getMessage() == (
        "step 3: 2 of 4 rewards failed and do not count; the first: no result within 3 s"
    )


class Guard:
    """A guard that checks the samples of these outcomes."""

    def __init__(self, size: int, *keys: str) -> None:
        self._guard = RewardGuard(size, config=load_config(RunConfig, keys).config)

    def check(self, outcomes: Sequence[RewardOutcome], *, end: EpisodeEnd | None = None) -> None:
        record = None if end is None else EpisodeRecord(end)
        self._guard.check(
            replace(sample, trajectory=replace(sample.trajectory, episode=record))
            for sample in group(*outcomes).samples
        )


def guard(size: int, *keys: str) -> Guard:
    return Guard(size, *keys)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (EpisodeEnd.FAILED, r"rollout\.agent: .* the latest: lost\. Repair .*/environments\.log\."),
        (EpisodeEnd.DEADLINE, r"agent\.timeout_s=600\.0: .* the latest: lost\. Raise it"),
    ],
)
def test_episodes_that_all_fail_blame_tools_and_not_the_reward(
    end: EpisodeEnd, message: str
) -> None:
    lost = RewardOutcome(RewardStatus.ERROR, math.nan, {}, "lost")
    own = guard(2, "trainer.default_local_dir=/runs/mine", "custom_reward_function.path=r.py")
    with pytest.raises(UserError, match=message):
        own.check([lost, lost], end=end)


def test_generations_that_only_fail_blame_the_learning_rate() -> None:
    own = guard(2, "actor_rollout_ref.actor.optim.lr=0.5")
    own.check([GENERATION_FAILED, PENDING, GENERATION_FAILED])
    with pytest.raises(UserError, match=r"optim\.lr=0\.5: the last 2 rewards all failed, because"):
        own.check([GENERATION_FAILED])


def test_nothing_is_said_without_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_failed_rewards([group(GOOD, GOOD)], "step 3")
    assert not caplog.records


def test_a_step_of_failed_rewards_ends_the_run_with_the_cause_and_the_log() -> None:
    own = guard(4, "custom_reward_function.path=r.py", "trainer.default_local_dir=/runs/mine")
    own.check([LATE, LATE, LATE])
    own.check([GOOD, LATE])
    own.check([LATE, LATE])
    with pytest.raises(
        UserError,
        match=r"path=\[r\.py\]: the last 4 rewards all failed, the latest: no result within 3 s\. "
        r"The traceback is in /runs/mine/rewards\.log\.",
    ):
        own.check([LATE, GOOD])


def test_three_steps_with_more_failures_than_rewards_end_the_run() -> None:
    bad, half = [LATE, LATE, LATE, GOOD], [LATE, GOOD, LATE, GOOD]
    own = guard(4)
    own.check([*bad, *bad, *half, *bad, *bad])
    with pytest.raises(UserError, match="data_source: more than half .* 3 steps in a row, the lat"):
        own.check(bad)


@pytest.mark.parametrize(
    ("version", "max_lag", "is_fresh"), [(3, 0, False), (4, 1, True), (4, 0, False), (6, 3, True)]
)
def test_a_token_that_is_too_old_or_too_new_is_never_used(
    version: int, max_lag: int, is_fresh: bool
) -> None:
    """The sample was begun by version 3 and ended by version 4."""
    completion = Completion(7, (1, 2, 3), (-0.5,) * 3, FinishReason.STOP, 3, ((2, 4),))
    sample = Sample(Trajectory.of_single_turn((1,), completion), "", GOOD)
    groups = [Group(Prompt(0, 0, (1,), "", "source", ""), (sample,))]
    if is_fresh:
        require_fresh(groups, version=version, max_lag=max_lag)
        return
    with pytest.raises(
        StaleSampleError, match=rf"sample 7 .* \[3, 4\] and cannot train version {version};"
    ):
        require_fresh(groups, version=version, max_lag=max_lag)
