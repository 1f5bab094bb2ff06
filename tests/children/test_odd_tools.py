# SPDX-License-Identifier: Apache-2.0
"""Function tools that end in odd ways: behind decorators, by exits, panics and cancellations."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, Task, ToolLimits
from tandem.types import AssistantTurn, Observation, ToolStatus
from tests.children import test_tools
from tests.children.test_tools import in_pool, texts, turn

FUNCTIONS = '''
import asyncio, functools
from verl.tools.function_tool import function_tool

class PanicException(BaseException):
    """A panic in a Rust extension."""

def escape(how):
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "exit":
        raise SystemExit("bad input")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "stop":
        raise StopIteration("done")
    raise PanicException("index out of bounds")

@function_tool
def leave(how: str) -> str:
    """Leave a thread.

    Args:
        how: In which way.
    """
    escape(how)

@function_tool
async def leave_loop(how: str) -> str:
    """Leave a coroutine.

    Args:
        how: In which way.
    """
    await asyncio.sleep(0)
    if how == "inner":
        await asyncio.gather(leave_loop("exit"))
    if how == "self":
        asyncio.current_task().cancel()
        await asyncio.sleep(60)
    escape(how)

def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@function_tool
@logged
async def decorated(seconds: float) -> str:
    """Wait, behind a decorator that knows nothing of coroutines.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return f"slept {seconds}"

@function_tool
def pages(first: int) -> str:
    """Give pages one by one.

    Args:
        first: The first.
    """
    yield f"page {first}"

@function_tool
async def later_pages(first: int) -> str:
    """Give pages one by one, when they come.

    Args:
        first: The first.
    """
    yield f"page {first}"
'''
NAMES = ("leave", "leave_loop", "decorated", "pages", "later_pages")


@pytest.fixture(scope="module")
def odd_functions(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentSetup:
    file = tmp_path_factory.mktemp("tools") / "odd_functions.py"
    file.write_text(FUNCTIONS)
    return EnvironmentSetup(function_path=str(file), limits=ToolLimits(timeout_s=10.0))


def task(number: int = 0) -> Task:
    return test_tools.task(NAMES, number)


def play(setup: EnvironmentSetup, *turns: AssistantTurn) -> Any:
    return test_tools.play(setup, *turns, of=task())


def test_a_decorated_coroutine_is_awaited_and_a_generator_is_a_failure(
    odd_functions: EnvironmentSetup,
) -> None:
    waited, *unfinished = play(
        odd_functions,
        turn(("decorated", {"seconds": 0.01})),
        turn(("pages", {"first": 1})),
        turn(("later_pages", {"first": 1})),
    )
    assert (texts(waited), waited.statuses) == (["slept 0.01"], (ToolStatus.OK,))
    kinds = [("pages", "generator"), ("later_pages", "async_generator")]
    for (name, kind), seen in zip(kinds, unfinished, strict=True):
        cause = f"the tool {name}: TypeError: a tool returned an object of the type {kind}, "
        assert seen.statuses == (ToolStatus.FAILED,) and seen.detail.startswith(cause)


@pytest.mark.parametrize("name", ["leave", "leave_loop"])
def test_an_error_that_is_no_exception_fails_its_call_at_once_and_alone(
    odd_functions: EnvironmentSetup, name: str
) -> None:
    """Exits, interrupts, panics, and cancellations that nobody has asked for."""
    causes = {
        "cancel": "CancelledError",
        "exit": "SystemExit: bad input",
        "interrupt": "KeyboardInterrupt",
        "stop": "StopIteration",
        "panic": "PanicException: index out of bounds",
    }
    if name == "leave_loop":
        causes |= {"inner": "SystemExit: bad input", "self": "CancelledError"}
    limits = replace(odd_functions.limits, timeout_s=600.0)

    async def work(pool: EnvironmentPool) -> list[Observation]:
        sessions = [pool.open(task(number=i)) for i in range(len(causes) + 1)]
        beside = asyncio.create_task(sessions.pop().step(turn(("decorated", {"seconds": 1.0}))))
        turns = [turn((name, {"how": how})) for how in causes]
        steps = [session.step(one) for session, one in zip(sessions, turns, strict=True)]
        return [*await asyncio.gather(*steps), await beside]

    *failed, beside = in_pool(replace(odd_functions, limits=limits), work)
    for cause, seen in zip(causes.values(), failed, strict=True):
        assert seen.statuses == (ToolStatus.FAILED,) and cause in seen.detail, seen
    assert texts(beside) == ["slept 1.0"], "the process lives"
