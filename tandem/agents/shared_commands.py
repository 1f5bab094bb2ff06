# SPDX-License-Identifier: Apache-2.0
"""Commands of the user that play many episodes at once, in a fixed number of processes.

A process gets lines of JSON: an episode to play, with its task and its access to the endpoint, or
one to stop. It answers with a line for each episode; other lines are prints. A process that ends
takes its episodes along: they have failed, and the next episode starts another process. One that
does not stop an episode gets no new ones, and is killed when it plays no other.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tandem.agents.setup import Access, ProgramEnd, ProgramSpec
from tandem.children.command import KEPT_BYTES, RunningCommand, start_command

STOP_WAIT_S = 5.0
"""The time in which a process answers that it has stopped an episode."""
_MAX_FAILURE_CHARACTERS = 200


class _Process:
    """A process, with the episodes that it plays."""

    def __init__(self, commands: SharedCommand) -> None:
        self._commands = commands
        self._command: RunningCommand | None = None
        self._unsent = b""
        self.playing: dict[str, asyncio.Future[ProgramEnd]] = {}
        self.is_retired = self.has_ended = False
        self.life = asyncio.get_running_loop().create_task(self._live())

    def end(self) -> None:
        """Kill the process, if it has not ended, without waiting."""
        if not self.has_ended:
            self.life.cancel()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, which waits for the start of the process."""
        line = json.dumps(message, default=str).encode() + b"\n"
        if self._command is None:
            self._unsent += line
        else:
            self._command.write(line)

    async def _live(self) -> None:
        """Start the process, and wait for its end."""
        argv = self._commands.spec.argv
        failure, errors = "it was stopped", ""
        try:
            command = await start_command(
                argv, environment=self._commands.environment, on_line=self._take
            )
            try:
                command.write(self._unsent)
                self._command = command
                await command.wait()
            finally:
                self.has_ended = True
                end = await command.end()
            failure, errors = end.describe(), end.errors
        except OSError as error:
            failure = f"{argv[0]} cannot be started: {error.strerror}"
        finally:
            self.has_ended = True
            self._commands.forget(self)
            if errors and self.playing:
                self._commands.log(errors)
            for answer in self.playing.values():
                if not answer.done():
                    answer.set_result(ProgramEnd(failure=failure))

    def _take(self, line: bytes) -> None:
        """Take the answer for an episode; anything else is a print."""
        if not line.startswith(b"{"):  # there may be very many
            return
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        answer = self.playing.get(str(message.get("episode")))
        if answer is None or answer.done():
            return
        failure = message.get("failure")
        if failure:
            self._commands.log(str(failure)[-KEPT_BYTES:])
        answer.set_result(ProgramEnd(message.get("returned"), _last_line(failure)))


class SharedCommand:
    """An agent whose command plays many episodes, in at most ``spec.num_processes`` processes.

    Args:
        environment: all environment variables of the processes.
        log: is called with the text that a failure printed.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        *,
        environment: Mapping[str, str],
        log: Callable[[str], None],
    ) -> None:
        self.spec, self.environment, self.log = spec, environment, log
        self._processes: list[_Process] = []

    async def play(self, task: Mapping[str, Any], access: Access) -> ProgramEnd:
        """Let a process play an episode; if this is cancelled, stop the episode."""
        process = self._choose()
        number = secrets.token_hex(16)
        answer: asyncio.Future[ProgramEnd] = asyncio.get_running_loop().create_future()
        process.playing[number] = answer
        process.send(
            {
                "episode": number,
                "task": task,
                "base_url": access.base_url,
                "api_key": access.api_key,
                "model": access.model,
            }
        )
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            process.send({"episode": number, "stop": True})
            _, still = await asyncio.wait((answer,), timeout=STOP_WAIT_S)
            process.is_retired = process.is_retired or bool(still)
            raise
        finally:
            del process.playing[number]
            if process.is_retired and not process.playing:
                process.end()

    async def close(self) -> None:
        """Kill all processes and their children, and wait until they are gone; idempotent."""
        lives = [process.life for process in self._processes]
        for process in self._processes:
            process.end()
        if lives:
            await asyncio.wait(lives)

    def forget(self, process: _Process) -> None:
        """Give a process that has ended no further episodes."""
        self._processes.remove(process)

    def _choose(self) -> _Process:
        """Return the process that plays the fewest episodes, or a new one if there is room."""
        usable = [one for one in self._processes if not one.is_retired and not one.has_ended]
        best = min(usable, key=lambda process: len(process.playing), default=None)
        if best is None or (best.playing and len(usable) < self.spec.num_processes):
            best = _Process(self)
            self._processes.append(best)
        return best


def _last_line(failure: Any) -> str:
    """Return the last line of a failure, which tells its cause; "" for no failure."""
    if not failure:
        return ""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[-1][:_MAX_FAILURE_CHARACTERS] if lines else "it failed without a text"
