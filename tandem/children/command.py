# SPDX-License-Identifier: Apache-2.0
"""A command of the user as a child process: its own process group, which ends with this process.

The command inherits one end of a pipe that this process holds open. The kernel signals the group
when the other end closes, which needs nothing of the command. What it prints is read to the end,
and the last part is kept. A reader may get the lines of its output as they come.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

KEPT_BYTES = 1 << 16
"""The number of bytes that are kept of each output."""
MAX_LINE_BYTES = 1 << 20
"""The length of a line that a reader gets; longer ones are left out."""
_CLOSE_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """The end of a command.

    Attributes:
        exit_code: its exit code, or the negative number of the signal that killed it.
        output, errors: the last part of what it printed.
    """

    exit_code: int
    output: str
    errors: str

    def describe(self) -> str:
        """Return how it ended, with the last line that it printed as an error."""
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        last = f": {lines[-1][:200]}" if lines else ""
        return f"ended with exit code {self.exit_code}{last}"


class _Outputs(asyncio.SubprocessProtocol):
    """The last part of what a command prints, and its end."""

    def __init__(self, on_line: Callable[[bytes], None] | None) -> None:
        loop = asyncio.get_running_loop()
        self._kept = {1: b"", 2: b""}
        self._open = set(self._kept)
        self._on_line = on_line
        self._partial, self._is_too_long = b"", False
        self.exited = loop.create_future()
        self.closed = loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See ``SubprocessProtocol``."""
        self._kept[fd] = (self._kept[fd] + data)[-KEPT_BYTES:]
        if fd == 1 and self._on_line is not None:
            self._split(data, self._on_line)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """See ``SubprocessProtocol``."""
        self._open.discard(fd)
        if not self._open and not self.closed.done():
            self.closed.set_result(None)

    def process_exited(self) -> None:
        """See ``SubprocessProtocol``."""
        if not self.exited.done():
            self.exited.set_result(None)

    def text(self, fd: int) -> str:
        """Return what was kept of an output."""
        return self._kept[fd].decode(errors="replace")

    def _split(self, data: bytes, on_line: Callable[[bytes], None]) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if not self._is_too_long and len(line) <= MAX_LINE_BYTES:
                on_line(line)
            self._is_too_long = False
        if len(self._partial) > MAX_LINE_BYTES:
            self._partial, self._is_too_long = b"", True


class RunningCommand:
    """A command that was started, until ``end``."""

    def __init__(
        self, transport: asyncio.SubprocessTransport, outputs: _Outputs, *, held_fd: int
    ) -> None:
        self._transport, self._outputs, self._held_fd = transport, outputs, held_fd
        pipe = transport.get_pipe_transport(0)
        assert isinstance(pipe, asyncio.WriteTransport), "the command has a standard input"
        self._input = pipe

    def write(self, data: bytes) -> None:
        """Write to its standard input without waiting; what it does not read any more is lost."""
        if not self._input.is_closing():
            self._input.write(data)

    def close_input(self) -> None:
        """Close its standard input once all is written."""
        if not self._input.is_closing():
            self._input.write_eof()

    async def wait(self) -> None:
        """Wait until it exits."""
        await asyncio.shield(self._outputs.exited)

    async def end(self) -> CommandEnd:
        """Kill it and all its children; return its end."""
        _kill_group(self._transport.get_pid())  # also what the command has left behind
        try:
            with suppress(TimeoutError):  # a process of another session may hold its outputs
                async with asyncio.timeout(_CLOSE_WAIT_S):
                    await self._outputs.exited
                    await self._outputs.closed
        finally:
            self._transport.close()
            os.close(self._held_fd)
        exit_code = self._transport.get_returncode()
        assert exit_code is not None, "the command has ended"
        return CommandEnd(exit_code, self._outputs.text(1), self._outputs.text(2))


async def start_command(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    on_line: Callable[[bytes], None] | None = None,
) -> RunningCommand:
    """Start a command, whose owner calls ``end``.

    Args:
        on_line: is called with each line of its output, without its end.

    Raises:
        OSError: the command cannot be started.
    """
    lifeline_fd, held_fd = os.pipe()
    try:
        transport, outputs = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Outputs(on_line),
            *argv,
            env=environment,
            pass_fds=(lifeline_fd,),
            start_new_session=True,
        )
        _signal_at_close(lifeline_fd, transport.get_pid())
    except BaseException:
        os.close(held_fd)
        raise
    finally:
        os.close(lifeline_fd)
    return RunningCommand(transport, outputs, held_fd=held_fd)


async def run_command(
    argv: Sequence[str], *, environment: Mapping[str, str], stdin: bytes
) -> CommandEnd:
    """Run a command to its end; if this is cancelled, kill the command and all its children.

    Raises:
        OSError: the command cannot be started.
    """
    command = await start_command(argv, environment=environment)
    try:
        command.write(stdin)
        command.close_input()
        await command.wait()
    finally:
        end = await command.end()
    return end


def _signal_at_close(lifeline_fd: int, pid: int) -> None:
    """Make the kernel send SIGIO, which kills, to the group of ``pid`` when the pipe closes."""
    try:
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -pid)
    except ProcessLookupError:
        return  # it has ended already, and has left nothing behind
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):  # all of them may have ended
        os.killpg(pid, signal.SIGKILL)
