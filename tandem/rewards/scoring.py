# SPDX-License-Identifier: Apache-2.0
"""The computation of rewards: find the functions, call them, check, sum and shape their results.

If a reward function raises or returns no finite number, the outcome is an ERROR with a one-line
cause. If one of several functions fails, the sample has failed. The parent process handles
functions that hang or die (``process``).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from tandem.children.environment import hint_at_withheld
from tandem.config.schema.imports import describe
from tandem.errors import UserError
from tandem.rewards.custom import LoadedFunction, RewardFunction, Signature, load_function
from tandem.rewards.routing import find_rule
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

ENVIRONMENT_KEY = "reward.environment"
"""The key that names the variables that reward functions may read."""
_ACCURACY, _PRED, _SCORE = "acc", "pred", "score"
_RESERVED = (_SCORE, _ACCURACY, _PRED)
"""The names of numbers with a meaning of their own, which no part may have."""


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
    """The reward to compute: the weighted sum of ``functions``.

    Attributes:
        functions: the user's functions; none for the built-in rule of each row's source.
        overlong: the penalty on overlong responses.
        needs_batch: whether every function must score batches (``reward_manager=batch``).

    Example:
        >>> RewardSpec((RewardFunction("reward.py", "compute_score"),))
    """

    functions: tuple[RewardFunction, ...] = ()
    overlong: OverlongBuffer | None = None
    needs_batch: bool = False


@dataclass(frozen=True, slots=True)
class Scorer:
    """A loaded reward.

    Attributes:
        is_sum: whether the score is a weighted sum with named parts.
        is_concurrent: whether a function is a coroutine function: calls then overlap.
        on_error: called with each exception of a reward function.
        withheld: the names of the variables of the run that this process does not have.
    """

    functions: tuple[LoadedFunction, ...]
    overlong: OverlongBuffer | None
    is_sum: bool
    is_concurrent: bool
    on_error: Callable[[BaseException], None]
    withheld: frozenset[str] = frozenset()

    @property
    def takes_groups(self) -> bool:
        """Whether a function scores all responses to a prompt in one call."""
        return any(function.takes_groups for function in self.functions)

    def describe(self, error: BaseException) -> str:
        """Describe an error in one line with the last line of the user's files, if it has one."""
        files = {file for function in self.functions if (file := function.file) is not None}
        hint = hint_at_withheld(error, self.withheld, key=ENVIRONMENT_KEY)
        return f"{describe(error, files)}; {hint}" if hint else describe(error, files)


def load_scorer(
    spec: RewardSpec,
    *,
    on_error: Callable[[BaseException], None],
    withheld: frozenset[str] = frozenset(),
) -> Scorer:
    """Load the functions of ``spec``.

    Args:
        withheld: the names of the variables of the run that this process does not have.

    Raises:
        UserError: a function cannot be loaded, two parts have one name, or no function takes a
            keyword of ``reward_kwargs``.
    """
    if not spec.functions:
        rule = RewardFunction("", "rule")
        functions = (LoadedFunction(rule, _score_by_rule, Signature.SAMPLE),)
        return Scorer(functions, spec.overlong, False, False, on_error)
    is_several = len(spec.functions) > 1
    functions = tuple(
        load_function(function, needs_batch=spec.needs_batch, is_one_of_several=is_several)
        for function in spec.functions
    )
    is_sum = is_several or functions[0].spec.weight != 1
    if is_sum:
        _check_parts(spec, functions)
    is_concurrent = any(function.is_async for function in functions)
    return Scorer(functions, spec.overlong, is_sum, is_concurrent, on_error, withheld)


def score_requests(scorer: Scorer, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
    """Score requests with plain functions; turn every exception into an outcome."""
    try:
        _scores(scorer, requests).send(None)  # nothing suspends it
    except StopIteration as end:
        return end.value
    raise AssertionError("a plain reward function cannot be awaited")


async def score_requests_concurrently(
    scorer: Scorer, requests: Sequence[RewardRequest], *, deadline_s: float
) -> list[RewardOutcome]:
    """Score requests, awaiting coroutine functions, in at most ``deadline_s``."""
    try:
        async with asyncio.timeout(deadline_s):
            return await _scores(scorer, requests)
    except TimeoutError:
        return [timeout(deadline_s)] * len(requests)


async def _scores(scorer: Scorer, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
    if scorer.is_sum:
        calls = [_column(scorer, function, requests=requests) for function in scorer.functions]
        columns = await _all(calls, scorer=scorer)
        outcomes = [_sum(scorer, parts) for parts in zip(*columns, strict=True)]
    else:
        outcomes = await _column(scorer, scorer.functions[0], requests=requests)
    buffer = scorer.overlong
    if buffer is None:
        return outcomes
    return [
        shape_outcome(outcome, buffer, num_tokens=request.num_tokens)
        for request, outcome in zip(requests, outcomes, strict=True)
    ]


async def _column(
    scorer: Scorer, function: LoadedFunction, *, requests: Sequence[RewardRequest]
) -> list[RewardOutcome]:
    """Return the outcome of one function for each request."""
    if function.takes_groups or len(requests) == 1:
        return await _call(scorer, function, requests=requests)
    calls = [_call(scorer, function, requests=[request]) for request in requests]
    return [outcome for (outcome,) in await _all(calls, scorer=scorer)]


async def _all(
    calls: Sequence[Coroutine[Any, Any, list[RewardOutcome]]], *, scorer: Scorer
) -> list[list[RewardOutcome]]:
    if scorer.is_concurrent and len(calls) > 1:
        return await asyncio.gather(*calls)
    return [await call for call in calls]


async def _call(
    scorer: Scorer, function: LoadedFunction, *, requests: Sequence[RewardRequest]
) -> list[RewardOutcome]:
    try:
        returned = function.call(**function.arguments(requests))
        if function.is_async:
            returned = await returned
        values = _values(returned, len(requests)) if function.takes_groups else [returned]
        may_abstain = function.signature is Signature.COLUMNS
        return [
            ABSTAINED if value is None and may_abstain else judge(value, is_part=scorer.is_sum)
            for value in values
        ]
    # A library that calls sys.exit() must not end the process.
    except (Exception, SystemExit) as error:
        scorer.on_error(error)
        return [failure(RewardStatus.ERROR, scorer.describe(error))] * len(requests)


def _values(returned: Any, count: int) -> list[Any]:
    if not hasattr(returned, "__len__") or isinstance(returned, Mapping | str | Set):
        text = f"{_shown(returned)}, not one value for each of {count} responses"
        raise TypeError(f"the function returned {text}")
    values = list(returned)
    if len(values) != count:
        raise ValueError(f"the function returned {len(values)} values for {count} responses")
    return values


def judge(returned: Any, *, is_part: bool = False) -> RewardOutcome:
    """Turn the result of a reward function into an outcome.

    A number is the score and, as in verl, ``acc``, unless it is a part of a sum. In a mapping,
    ``score`` is the score and ``pred`` the prediction; other finite numbers and booleans are kept
    as numbers, all other values as text.
    """
    if not isinstance(returned, Mapping):
        score = as_number(returned)
        if score is None:
            return _not_a_number(returned)
        return RewardOutcome(RewardStatus.VALUE, score, {} if is_part else {_ACCURACY: score})
    if _SCORE not in returned:
        keys = ", ".join(map(str, returned))
        return failure(RewardStatus.ERROR, f"returned a mapping without 'score' (keys: {keys})")
    score = as_number(returned[_SCORE])
    if score is None:
        return _not_a_number(returned[_SCORE])
    others = {str(key): value for key, value in returned.items() if key not in (_SCORE, _PRED)}
    numbers = {key: as_number(value) for key, value in others.items()}
    extra = {key: number for key, number in numbers.items() if number is not None}
    texts = {
        key: value if isinstance(value, str) else _written(value)
        for key, value in others.items()
        if key not in extra
    }
    prediction = returned.get(_PRED)
    return RewardOutcome(
        RewardStatus.VALUE,
        score,
        extra,
        prediction=None if prediction is None else _written(prediction, str),
        texts=texts,
    )


def _sum(scorer: Scorer, outcomes: Sequence[RewardOutcome]) -> RewardOutcome:
    """Return the weighted sum of the parts of one response; a failure if one of them failed.

    The score of each part keeps its name. ``acc`` and ``pred`` are those of the first part that
    returns them; other values have the name of their part in front.
    """
    counted = [
        (function.spec, outcome)
        for function, outcome in zip(scorer.functions, outcomes, strict=True)
        if outcome is not ABSTAINED
    ]
    if not counted:
        return ABSTAINED
    for spec, outcome in counted:
        if outcome.status is not RewardStatus.VALUE:
            return replace(outcome, detail=f"{spec.name}: {outcome.detail}")
    extra = {spec.name: outcome.score for spec, outcome in counted}
    texts: dict[str, str] = {}
    for spec, outcome in counted:
        for name, value in outcome.extra.items():
            extra.setdefault(name if name == _ACCURACY else f"{spec.name}/{name}", value)
        texts |= {f"{spec.name}/{name}": text for name, text in outcome.texts.items()}
    predictions = (outcome.prediction for _, outcome in counted)
    return RewardOutcome(
        RewardStatus.VALUE,
        sum(spec.weight * outcome.score for spec, outcome in counted),
        extra,
        prediction=next((one for one in predictions if one is not None), None),
        texts=texts,
    )


def as_number(value: Any) -> float | None:
    """Convert a value with ``__float__`` (NumPy scalars too) to a finite float, else None."""
    if not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, ArithmeticError):
        return None
    return number if math.isfinite(number) else None


def failure(status: RewardStatus, detail: str) -> RewardOutcome:
    """Return an outcome without a value."""
    return RewardOutcome(status, math.nan, {}, detail)


ABSTAINED = failure(RewardStatus.ERROR, "every function returned None for this response")
"""The outcome of a function with TRL's signature that returns None: it does not count."""


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
    extra = {_SCORE: outcome.score, **outcome.extra}
    if buffer.log:
        extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
    return replace(outcome, score=outcome.score + penalty, extra=extra)


def _score_by_rule(data_source: str, solution_str: str, **rest: Any) -> Any:
    rule = find_rule(data_source)
    if rule is None:
        raise LookupError(f"no built-in reward for data_source={data_source!r}")
    return rule(data_source, solution_str, **rest)


def _check_parts(spec: RewardSpec, functions: Sequence[LoadedFunction]) -> None:
    parts = [function.spec.name for function in functions]
    for part in parts:
        if part in _RESERVED or parts.count(part) > 1:
            taken = "has a meaning of its own" if part in _RESERVED else "names two functions"
            raise UserError(
                "custom_reward_function.path",
                [f"{function.path}:{function.name}" for function in spec.functions],
                rule=f"{part!r} {taken}, and each function names a part of the reward",
                remedy="Rename a function.",
            )
    known = {name for function in functions for name in function.spec.reward_kwargs}
    for name in dict.fromkeys(name for one in spec.functions for name in one.reward_kwargs):
        if name not in known:
            raise UserError(
                f"custom_reward_function.reward_kwargs.{name}",
                rule=f"none of the functions {', '.join(parts)} takes it",
                remedy="Remove it, or add the parameter.",
            )


def _shown(value: Any) -> str:
    return f"{_written(value)[:80]} ({type(value).__name__})"


def _written(value: Any, write: Callable[[Any], str] = repr) -> str:
    """Return a value as text; its type if it cannot be written, as integers of 4,301 digits."""
    try:
        return write(value)
    except Exception:
        return f"<{type(value).__name__}>"


def _not_a_number(value: Any) -> RewardOutcome:
    return failure(RewardStatus.ERROR, f"returned {_shown(value)}, not a finite number")
