# SPDX-License-Identifier: Apache-2.0
"""Programs and their stops: signals on the main thread, an event loop here, other threads."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Callable

import pytest

from tandem.driver.execution import SAME_REQUEST_S, Ended, StopSwitch, complete, execute
from tests.fakes.patience import PATIENCE_S


class Program:
    """A program that runs until it is stopped, and returns the name of its thread."""

    def __init__(self, switch: StopSwitch) -> None:
        self._switch = switch
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    async def __call__(self) -> str:
        stopped = asyncio.Event()

        async def stop() -> None:
            stopped.set()

        self._switch.on_stop(stop)
        self.has_begun.set()
        await asyncio.wait_for(stopped.wait(), PATIENCE_S)
        await asyncio.to_thread(self.may_end.wait, PATIENCE_S)
        return threading.current_thread().name


def send_when(has_begun: threading.Event, *, sent: threading.Event) -> threading.Thread:
    """Return a running thread that sends SIGINT and SIGTERM to this process once the program runs.

    A launcher that is interrupted at a terminal does so.
    """

    def send() -> None:
        assert has_begun.wait(PATIENCE_S)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        sent.set()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def run_in_a_loop(function: Callable[[], Ended[str]]) -> Ended[str]:
    """Call a function where an event loop runs, as a cell of a notebook is."""

    async def cell() -> Ended[str]:
        return function()

    return asyncio.run(cell())


@pytest.mark.parametrize("surroundings", [lambda function: function(), run_in_a_loop])
def test_an_interrupt_stops_the_program(
    surroundings: Callable[[Callable[[], Ended[str]]], Ended[str]],
) -> None:
    switch = StopSwitch()
    program = Program(switch)
    handler = signal.getsignal(signal.SIGINT)
    program.may_end.clear()
    sender = send_when(program.has_begun, sent=program.may_end)
    ended = surroundings(lambda: execute(program, switch=switch))
    sender.join()
    assert switch.signal_number in (signal.SIGINT, signal.SIGTERM)
    assert ended.exit_code == 128 + switch.signal_number
    assert signal.getsignal(signal.SIGINT) is handler


def run_stopped() -> Ended[str]:
    """Run a program whose switch was pressed before it began."""
    switch = StopSwitch()
    switch.press()
    return execute(Program(switch), switch=switch)


def test_where_a_loop_runs_the_program_has_a_thread_of_its_own() -> None:
    assert run_stopped().result == "MainThread"
    assert run_in_a_loop(run_stopped).result.startswith("run")


def test_on_other_threads_no_signal_is_handled() -> None:
    handlers: list[object] = []

    def body() -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        assert run_stopped().exit_code == 0
        handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGTERM)] * 2


def test_a_switch_stops_from_another_thread_and_after_the_end_does_nothing() -> None:
    switch = StopSwitch()
    program = Program(switch)

    def press() -> None:
        assert program.has_begun.wait(PATIENCE_S)
        switch.press()

    thread = threading.Thread(target=press)
    thread.start()
    assert execute(program, switch=switch).exit_code == 0
    thread.join()
    switch.press()


def test_a_second_interrupt_cancels_the_program_on_its_thread() -> None:
    cancelled = threading.Event()
    has_begun = threading.Event()

    async def endless() -> None:
        has_begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    interrupt_again = threading.Timer(SAME_REQUEST_S, lambda: os.kill(os.getpid(), signal.SIGINT))

    async def cell() -> None:
        complete(endless, on_signal=lambda number: interrupt_again.start())

    sender = send_when(has_begun, sent=threading.Event())
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell())
    sender.join()
    assert cancelled.wait(PATIENCE_S)


@pytest.mark.parametrize("run", [asyncio.run, lambda cell: cell.send(None)])
def test_an_error_of_the_program_is_raised(run: Callable[[Awaitable[None]], None]) -> None:
    async def failing() -> None:
        raise LookupError("the cause")

    async def grouped() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing())

    async def cell() -> None:
        execute(grouped, switch=StopSwitch())

    with pytest.raises(LookupError, match="the cause"):
        run(cell())
