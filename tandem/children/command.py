# SPDX-License-Identifier: Apache-2.0
"""A command of the user as a child process, which ends with this process and with all its children.

Between both stands a small program, the keeper (``keeper``). It inherits one end of a pipe that
this process holds open, and kills what the command has started when the other end closes. What the
command prints is read to the end, and the last part is kept. A reader may get the lines of its
output as they come.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem.children import keeper

KEPT_BYTES = 1 << 16
"""The number of bytes that are kept of what a command prints as errors."""
MAX_LINE_BYTES = 1 << 20
"""The length of a line that a reader gets; longer ones are left out."""
_KEPT_BYTES = {1: MAX_LINE_BYTES + KEPT_BYTES, 2: KEPT_BYTES}
"""The number of bytes that are kept of each output: the last line is whole."""
_EXIT_WAIT_S = 10.0
"""The time in which the keeper kills what the command has started."""
_CLOSE_WAIT_S = 2.0
_TRACEBACK = "Traceback (most recent call last):"
_REPORT = re.compile(r"(\[cause\]: |Uncaught )?([\w.$]*(Error|Exception)|error|panic)\b[^:]*:")
_KEEPER = (sys.executable, "-I", "-S", keeper.__file__)


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
        """Return how it ended, with the line of its errors that tells the cause."""
        if self.exit_code < 0:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        cause = _find_cause(self.errors)[:200]
        return f"ended with exit code {self.exit_code}" + (f": {cause}" if cause else "")


def _find_cause(errors: str) -> str:
    """Return the last line that reports an error, as in ``TypeError: fetch failed``.

    Behind a traceback of Python, or without such a line, it is the last line; "" without any line.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    reports = [] if _TRACEBACK in lines else [line for line in lines if _REPORT.match(line)]
    return next(reversed(reports or lines), "")


class _Outputs(asyncio.SubprocessProtocol):
    """The last part of what a command prints, and its end."""

    def __init__(self, on_line: Callable[[bytes], None] | None) -> None:
        loop = asyncio.get_running_loop()
        self._kept = {1: bytearray(), 2: bytearray()}
        self._open = set(self._kept)
        self._on_line = on_line
        self._partial, self._is_too_long = b"", False
        self.exited = loop.create_future()
        self.closed = loop.create_future()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See ``SubprocessProtocol``."""
        kept = self._kept[fd]
        kept += data
        if len(kept) > 2 * _KEPT_BYTES[fd]:
            del kept[: -_KEPT_BYTES[fd]]
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
        return self._kept[fd][-_KEPT_BYTES[fd] :].decode(errors="replace")

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
        os.close(self._held_fd)
        try:
            await asyncio.wait((self._outputs.exited,), timeout=_EXIT_WAIT_S)
            if not self._outputs.exited.done():
                self._transport.kill()
                await self._outputs.exited
            await asyncio.wait((self._outputs.closed,), timeout=_CLOSE_WAIT_S)
        finally:
            self._transport.close()
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
    if shutil.which(argv[0], path=environment.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), argv[0])
    lifeline_fd, held_fd = os.pipe()
    try:
        transport, outputs = await asyncio.get_running_loop().subprocess_exec(
            lambda: _Outputs(on_line),
            *(*_KEEPER, str(lifeline_fd), *argv),
            env=environment,
            pass_fds=(lifeline_fd,),
            start_new_session=True,
        )
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
