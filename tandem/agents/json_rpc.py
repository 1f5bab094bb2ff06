# SPDX-License-Identifier: Apache-2.0
"""JSON-RPC 2.0 with a program over its standard input and output, one message a line.

Several questions may be under way at once. The program belongs to the process group of this
process, so that it ends with it. A program that ends, or that writes something else, is lost: every
question to it fails.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

VERSION = "2.0"
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
MAX_MESSAGE_BYTES = 64 << 20
_END_WAIT_S = 1.0


class RpcRefused(Exception):
    """The error of a question that was answered with an error.

    Attributes:
        code: the number that the answer gives for its kind.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class RpcLost(Exception):
    """The error of a question that nobody can answer any more; its text is the cause."""


def read_result(answer: Mapping[str, Any]) -> Any:
    """Return the result that an answer holds; raise RpcRefused if it holds an error."""
    error = answer.get("error")
    if error is None:
        return answer.get("result")
    fields = error if isinstance(error, dict) else {}
    raise RpcRefused(int(fields.get("code") or 0), str(fields.get("message") or error))


def answer_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request of the other side, which may only ask whether we live."""
    answer = {"jsonrpc": VERSION, "id": request.get("id")}
    if request.get("method") == "ping":
        return {**answer, "result": {}}
    error = {"code": METHOD_NOT_FOUND, "message": f"{request.get('method')} is not built"}
    return {**answer, "error": error}


class RpcProgram:
    """A running program.

    Args:
        process: the program, whose input and output are pipes.

    Example:
        >>> program = await start_program(["server"], environment={}, folder=None)
        >>> result = await program.ask("ping")
        >>> await program.close()
    """

    def __init__(self, process: asyncio.subprocess.Process, *, name: str) -> None:
        self._process = process
        self._name = name
        self._questions: dict[int, asyncio.Future[Mapping[str, Any]]] = {}
        self._num_asked = 0
        self._lost = ""
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Ask a question and return its result; if this is cancelled, tell the program.

        Raises:
            RpcRefused: the program answers with an error.
            RpcLost: the program has ended.
        """
        if self._lost:
            raise RpcLost(self._lost)
        self._num_asked += 1
        number = self._num_asked
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._write({"id": number, "method": method, "params": params or {}})
            return read_result(await answer)
        except asyncio.CancelledError:
            with suppress(RpcLost):
                self.tell("notifications/cancelled", {"requestId": number})
            raise
        finally:
            self._questions.pop(number, None)

    def tell(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        """Send what needs no answer; raise RpcLost if the program has ended."""
        self._write({"method": method, "params": params or {}})

    async def close(self) -> None:
        """Close the input of the program, and kill it if it does not end."""
        assert self._process.stdin is not None, "the input of the program is a pipe"
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._reading.cancel()
        await asyncio.wait((self._reading,))

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None, "the input of the program is a pipe"
        if self._process.stdin.is_closing():
            raise RpcLost(self._lost or f"{self._name} has ended: its input is closed")
        line = json.dumps({"jsonrpc": VERSION, **message}).encode() + b"\n"
        self._process.stdin.write(line)

    async def _read(self) -> None:
        """Take messages until the program ends; then all questions fail."""
        assert self._process.stdout is not None, "the output of the program is a pipe"
        cause = f"{self._name} has ended"
        try:
            while line := await self._process.stdout.readline():
                self._take(line)
        except ValueError:
            cause = f"{self._name} wrote a line of more than {MAX_MESSAGE_BYTES} bytes"
            self._process.kill()
        except (ConnectionError, RpcLost):
            pass  # it ends
        self._lost = cause
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(RpcLost(cause))

    def _take(self, line: bytes) -> None:
        """Take a message. Other lines are prints, as programs make them by mistake."""
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            os.write(2, line)
            return
        if not isinstance(message, dict):
            return
        if "method" in message:
            if "id" in message:
                self._write(answer_request(message))
            return
        number = message.get("id")
        answer = self._questions.get(number) if isinstance(number, int) else None
        if answer is not None and not answer.done():
            answer.set_result(message)


async def start_program(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: str | None
) -> RpcProgram:
    """Start a program; raise RpcLost if it cannot be started. Its errors go to ours."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd=folder,
            limit=MAX_MESSAGE_BYTES,
        )
    except OSError as error:
        raise RpcLost(f"{argv[0]} cannot be started: {error.strerror}") from error
    return RpcProgram(process, name=argv[0])
