# SPDX-License-Identifier: Apache-2.0
"""The computation of one reward: find the function, call it, check and shape its result.

If a reward function raises or returns no finite number, the outcome is an ERROR with a one-line
cause. The parent process handles functions that hang or die (``process``).
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.schema.imports import describe
from tandem.errors import UserError
from tandem.rewards.custom import CustomReward, load_custom_reward
from tandem.rewards.routing import find_rule
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

_PRED = "pred"


@dataclass(frozen=True, slots=True)
class OverlongBuffer:
    """The overlong penalty of DAPO (arXiv:2503.14476), by the number of response tokens.

    It is 0 up to ``max_tokens - buffer_tokens`` and falls to ``-penalty_factor`` at ``max_tokens``.
    The two lengths are verl's ``max_resp_len`` and ``overlong_buffer_cfg.len``. With ``log``,
    outcomes include the penalty.

    Raises:
        UserError: the buffer is empty, or longer than ``max_tokens``.
    """

    max_tokens: int
    buffer_tokens: int
    penalty_factor: float
    log: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.buffer_tokens <= self.max_tokens:
            raise UserError(
                "reward_model.reward_kwargs.overlong_buffer_cfg.len",
                self.buffer_tokens,
                rule=f"must be from 1 to max_resp_len={self.max_tokens}",
                remedy="Choose a shorter buffer.",
            )


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """The reward to compute; without ``custom``, the built-in rule of each row's source.

    Example:
        >>> RewardSpec(custom=CustomReward(path="reward.py", name="compute_score"))
    """

    custom: CustomReward | None = None
    overlong: OverlongBuffer | None = None


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward; ``is_concurrent`` if the function is a coroutine function."""

    function: Callable[..., Any]
    overlong: OverlongBuffer | None
    reward_kwargs: Mapping[str, Any]
    is_concurrent: bool


def load_scorer(spec: RewardSpec) -> Scorer:
    """Load the function of ``spec``, from the user's file if it names one.

    Raises:
        UserError: the function cannot be loaded.
    """
    if spec.custom is None:
        return Scorer(_score_by_rule, spec.overlong, {}, is_concurrent=False)
    function = load_custom_reward(spec.custom)
    is_concurrent = inspect.iscoroutinefunction(function)
    return Scorer(function, spec.overlong, spec.custom.reward_kwargs, is_concurrent)


def score_request(scorer: Scorer, request: RewardRequest) -> RewardOutcome:
    """Call a plain reward function; turn every exception into an outcome."""
    try:
        outcome = judge(scorer.function(**_arguments(scorer, request)))
    # A library that calls sys.exit() must not end the process.
    except (Exception, SystemExit) as error:
        return failure(RewardStatus.ERROR, describe(error))
    return _shaped(scorer, request, outcome=outcome)


async def score_request_concurrently(
    scorer: Scorer, request: RewardRequest, *, deadline_s: float
) -> RewardOutcome:
    """Await a coroutine reward function for at most ``deadline_s``."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            outcome = judge(await scorer.function(**_arguments(scorer, request)))
    except (Exception, SystemExit) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return timeout(deadline_s)
        return failure(RewardStatus.ERROR, describe(error))
    return _shaped(scorer, request, outcome=outcome)


def judge(returned: Any) -> RewardOutcome:
    """Turn the result of a reward function into an outcome.

    A number is the score and, as in verl, ``acc``. In a mapping, ``score`` is the score and
    ``pred`` the prediction; other finite numbers and booleans are kept, all other values dropped.
    """
    if not isinstance(returned, Mapping):
        score = as_number(returned)
        if score is None:
            return _not_a_number(returned)
        return RewardOutcome(RewardStatus.VALUE, score, {"acc": score})
    if "score" not in returned:
        keys = ", ".join(map(str, returned))
        return failure(RewardStatus.ERROR, f"returned a mapping without 'score' (keys: {keys})")
    score = as_number(returned["score"])
    if score is None:
        return _not_a_number(returned["score"])
    others = {str(key): value for key, value in returned.items() if key not in ("score", _PRED)}
    numbers = {key: as_number(value) for key, value in others.items()}
    extra = {key: number for key, number in numbers.items() if number is not None}
    prediction = returned.get(_PRED)
    return RewardOutcome(
        RewardStatus.VALUE,
        score,
        extra,
        prediction=None if prediction is None else str(prediction),
    )


def as_number(value: Any) -> float | None:
    """Convert a value with ``__float__`` (NumPy scalars too) to a finite float, else None."""
    if not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def failure(status: RewardStatus, detail: str) -> RewardOutcome:
    """Return an outcome without a value."""
    return RewardOutcome(status, math.nan, {}, detail)


def timeout(deadline_s: float) -> RewardOutcome:
    """Return the outcome of a reward that exceeded its deadline."""
    return failure(RewardStatus.TIMEOUT, f"no result within {deadline_s:g} s")


def overlong_penalty(num_tokens: int, buffer: OverlongBuffer) -> float:
    """Compute the penalty of a response of ``num_tokens``: 0 or less, to be added to its score."""
    excess = num_tokens - (buffer.max_tokens - buffer.buffer_tokens)
    return min(-excess / buffer.buffer_tokens * buffer.penalty_factor, 0.0)


def shape_outcome(
    outcome: RewardOutcome, buffer: OverlongBuffer, *, num_tokens: int
) -> RewardOutcome:
    """Add the overlong penalty to the score; return a failure unchanged.

    ``extra`` gets the raw ``score`` and, with ``buffer.log``, ``overlong_reward`` and ``overlong``.
    ``acc`` stays unchanged.
    """
    if outcome.status is not RewardStatus.VALUE:
        return outcome
    penalty = overlong_penalty(num_tokens, buffer)
    extra = {"score": outcome.score, **outcome.extra}
    if buffer.log:
        extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
    return replace(outcome, score=outcome.score + penalty, extra=extra)


def _score_by_rule(data_source: str, solution_str: str, **rest: Any) -> Any:
    rule = find_rule(data_source)
    if rule is None:
        raise LookupError(f"no built-in reward for data_source={data_source!r}")
    return rule(data_source, solution_str, **rest)


def _arguments(scorer: Scorer, request: RewardRequest) -> dict[str, Any]:
    return {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": dict(request.extra_info),
        **scorer.reward_kwargs,
    }


def _shaped(scorer: Scorer, request: RewardRequest, *, outcome: RewardOutcome) -> RewardOutcome:
    if scorer.overlong is None:
        return outcome
    return shape_outcome(outcome, scorer.overlong, num_tokens=request.num_tokens)


def _not_a_number(value: Any) -> RewardOutcome:
    text = repr(value)[:80]
    return failure(
        RewardStatus.ERROR, f"returned {text} ({type(value).__name__}), not a finite number"
    )
