# SPDX-License-Identifier: Apache-2.0
"""From a request to a typed outcome: find the function, call it, judge and shape its result.

Whatever a reward function does wrong (raises, returns no finite number) becomes an ERROR outcome
with a one-line cause. Hanging and dying are not handled here but by the process that is watched.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.rewards.custom import CustomReward, describe, load_custom_reward
from tandem.rewards.routing import find_rule
from tandem.rewards.shaping import OverlongBuffer, shape_outcome
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

_PRED = "pred"


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """What to compute; without ``custom`` the built-in rule of each row's source.

    Example:
        >>> RewardSpec(custom=CustomReward(path="reward.py", name="compute_score"))
    """

    custom: CustomReward | None = None
    overlong: OverlongBuffer | None = None


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward; ``is_concurrent``: a coroutine function, whose calls wait together."""

    function: Callable[..., Any]
    overlong: OverlongBuffer | None
    reward_kwargs: Mapping[str, Any]
    is_concurrent: bool


def load_scorer(spec: RewardSpec) -> Scorer:
    """Load the function of ``spec``; imports the user's file if there is one.

    Raises:
        UserError: it cannot be loaded.
    """
    if spec.custom is None:
        return Scorer(_score_by_rule, spec.overlong, {}, is_concurrent=False)
    function = load_custom_reward(spec.custom)
    is_concurrent = inspect.iscoroutinefunction(function)
    return Scorer(function, spec.overlong, spec.custom.reward_kwargs, is_concurrent)


def score_request(scorer: Scorer, request: RewardRequest) -> RewardOutcome:
    """Call a plain reward function. Raises nothing that an exception handler could catch."""
    try:
        outcome = judge(scorer.function(**_arguments(scorer, request)))
    # SystemExit too: a library that calls sys.exit() must not take the process along.
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
    """What a reward function returned, as an outcome. A number is its own ``acc``, as in verl.

    Of a mapping, ``score`` is the score and ``pred`` the prediction; its other finite numbers (and
    booleans) are kept, the rest is dropped.
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
    """``value`` as a finite float, or None; takes what has ``__float__``, as NumPy scalars."""
    if not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if math.isfinite(number) else None


def failure(status: RewardStatus, detail: str) -> RewardOutcome:
    """An outcome without a value."""
    return RewardOutcome(status, math.nan, {}, detail)


def timeout(deadline_s: float) -> RewardOutcome:
    """The outcome of a reward that took too long."""
    return failure(RewardStatus.TIMEOUT, f"no result within {deadline_s:g} s")


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
        RewardStatus.ERROR, f"returned {text} ({type(value).__name__}), which is no finite number"
    )
