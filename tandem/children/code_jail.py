# SPDX-License-Identifier: Apache-2.0
"""The parent's side of jailed executions: it starts the ``zygote``, and runs programs in it.

A program travels in a file without a name, its output in a pipe that is read up to a limit. Every
wait ends: the zygote kills an execution at its deadline, and this side kills a zygote that does not
answer. A zygote that died is replaced, and the executions it took along are run once more.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from tandem.children.jail import JailLimits
from tandem.children.jail_trial import Protection
from tandem.children.scratch import has_too_much
from tandem.children.zygote import MESSAGE_BYTES, PREPARED

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = [*json.loads(sys.argv[1]), *sys.path]; "
    "from tandem.children.zygote import main; main(int(sys.argv[2]))"
)
# The order of sets of texts is the same in all executions, so that outputs can be repeated.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_START_DEADLINE_S = 60.0
_GRACE_S = 10.0
_READ_BYTES = 1 << 16
_MEASURE_S = 0.02
_SIGXCPU = 24


class JailError(Exception):
    """The error of executions that could not be made: the program is not at fault."""


class _ZygoteLost(Exception):
    """The error of an execution whose zygote ended."""


class ExecutionEnd(Enum):
    """The way in which an execution ended.

    FAILED is an exception or an exit code of the program, FILES are more than its folder may hold,
    KILLED is a signal.
    """

    DONE = "done"
    FAILED = "failed"
    TIME = "time"
    OUTPUT = "output"
    FILES = "files"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class Execution:
    """The outcome of a program.

    Attributes:
        output: what it wrote to stdout and stderr, up to the limit.
        code: its exit code; minus the signal that killed it.
        cpu_s: its processor time, with that of entering the jail.

    Example:
        >>> Execution(ExecutionEnd.DONE, "42\\n", code=0, cpu_s=0.003).output
        '42\\n'
    """

    end: ExecutionEnd
    output: str
    code: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class _Request:
    limits: JailLimits
    prints_last: bool
    scratch: str

    def has_too_much(self) -> bool:
        """Return whether the folder of the program, if it has one, has more than it may."""
        most = self.limits.scratch_bytes
        return bool(self.scratch) and has_too_much(self.scratch, max_bytes=most)


class CodeJail:
    """The jailed executions of this process.

    Args:
        modules: what is imported before programs, beside modules of the standard library.
        max_at_once: the number of executions at the same time; others wait.
        launcher: words before the command of the interpreter.
        interpreter: the interpreter of the programs.

    Example:
        >>> async with CodeJail() as jail:
        ...     execution = await jail.execute("print(6 * 7)", JailLimits(wall_s=5.0))
    """

    def __init__(
        self,
        *,
        modules: Sequence[str] = (),
        max_at_once: int = 4,
        launcher: Sequence[str] = (),
        interpreter: str = sys.executable,
    ) -> None:
        self._modules = list(modules)
        self._places = asyncio.Semaphore(max_at_once)
        self._command = [*launcher, interpreter]
        self._starting = asyncio.Lock()
        self._zygote: _Zygote | None = None

    async def __aenter__(self) -> CodeJail:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> tuple[Protection, ...]:
        """Start the zygote if none runs; return the protections of its jail.

        Raises:
            JailError: it does not start, or a module cannot be imported.
        """
        return (await self._running()).protections

    async def execute(
        self, program: str, limits: JailLimits, *, prints_last: bool = False, scratch: str = ""
    ) -> Execution:
        """Execute a program. Its mistakes are outcomes.

        Args:
            prints_last: print the value of an expression that ends the program.
            scratch: a folder of ``ScratchPlace`` that it may write ``limits.scratch_bytes`` to; ""
                for none. One execution at a time has it.

        Raises:
            JailError: the program could not be executed, through no fault of its own.
        """
        request = _Request(limits, prints_last, scratch)
        async with self._places:
            try:
                return await (await self._running()).execute(program, request)
            except _ZygoteLost as error:
                if scratch:  # it may have left a part of its files
                    raise JailError(str(error)) from error
            try:
                return await (await self._running()).execute(program, request)
            except _ZygoteLost as error:
                raise JailError(str(error)) from error

    async def close(self) -> None:
        """Kill the zygote and with it all executions; idempotent."""
        if self._zygote is not None:
            self._zygote.kill()
            await asyncio.to_thread(self._zygote.process.wait)
            self._zygote = None

    async def _running(self) -> _Zygote:
        if sys.platform != "linux":
            raise JailError("code of a model is executed on Linux only")
        async with self._starting:
            if self._zygote is not None and self._zygote.is_open:
                return self._zygote
            await self.close()
            self._zygote = _Zygote(self._command)
            try:
                await self._zygote.greet(self._modules)
            except (TimeoutError, _ZygoteLost) as error:
                await self.close()
                raise JailError(f"the interpreter for programs does not start: {error}") from error
            return self._zygote


def survey_protections() -> tuple[Protection, ...]:
    """Return the protections of the jail on this machine; raise JailError if it cannot start."""

    async def survey() -> tuple[Protection, ...]:
        async with CodeJail() as jail:
            return await jail.start()

    return asyncio.run(survey())


class _Zygote:
    """A running zygote, and the executions that wait for its answers."""

    def __init__(self, command: Sequence[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(__file__).parents[2])
        words = ["-s", "-P", "-S", "-c", _BOOTSTRAP, json.dumps([root]), str(theirs.fileno())]
        try:
            # No session of its own: it belongs to the group that the owner of this process kills.
            self.process = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
            )
        finally:
            theirs.close()
        self.protections: tuple[Protection, ...] = ()
        self.is_open = True
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, object]]] = {}
        self._greeting: asyncio.Future[dict[str, object]] = self._loop.create_future()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._receive)

    async def greet(self, modules: Sequence[str]) -> None:
        """Send the setup, and wait until it is warm; raise JailError if an import fails."""
        folders = sysconfig.get_paths()
        packages = sorted({folders["purelib"], folders["platlib"]})
        setup = {"modules": modules, "packages": packages}
        self._channel.send(json.dumps(setup).encode())
        async with asyncio.timeout(_START_DEADLINE_S):
            greeting = await self._greeting
        if "error" in greeting:
            raise JailError(f"a module for programs cannot be imported: {greeting['error']}")
        told = greeting["protections"]
        assert isinstance(told, list), "the zygote sends a list"
        self.protections = tuple(Protection(**fields) for fields in told)

    async def execute(self, program: str, request: _Request) -> Execution:
        """Execute a program; raise JailError or _ZygoteLost if that fails."""
        limits = request.limits
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, object]] = self._loop.create_future()
        self._answers[number] = answer
        output_fd = -1
        try:
            output_fd = self._send(number, program, request=request)
            async with asyncio.timeout(limits.wall_s + _GRACE_S):
                async with self._measured(number, request):
                    output, is_cut = await self._read_output(number, output_fd, limits=limits)
                    fields = await answer
        except TimeoutError as error:
            self.kill()
            raise _ZygoteLost("the interpreter for programs does not answer") from error
        finally:
            if output_fd >= 0:
                os.close(output_fd)
            if not answer.done():
                self._ask_to_kill(number)
            del self._answers[number]
        excess = ExecutionEnd.OUTPUT if is_cut else None
        if request.has_too_much():
            excess = ExecutionEnd.FILES
        return _read_outcome(fields, output, excess=excess)

    def kill(self) -> None:
        """Kill the zygote without waiting; its executions end with it."""
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self.process.kill()
            for waiting in (self._greeting, *self._answers.values()):
                if not waiting.done():
                    waiting.set_exception(_ZygoteLost("the interpreter for programs has ended"))
                    waiting.exception()  # seen, even if nobody waits for it

    def _send(self, number: int, program: str, *, request: _Request) -> int:
        """Send a program to the zygote; return the end of the pipe that its output comes from."""
        if not self.is_open:
            raise _ZygoteLost("the interpreter for programs has ended")
        ours, theirs = os.pipe()
        program_fd = os.memfd_create("program")
        try:
            with os.fdopen(os.dup(program_fd), "wb") as file:
                file.write(program.encode(errors="replace"))
            os.lseek(program_fd, 0, os.SEEK_SET)
            message = json.dumps({"number": number, **asdict(request)}).encode()
            socket.send_fds(self._channel, [message], [program_fd, theirs])
        except OSError as error:
            os.close(ours)
            raise _ZygoteLost(f"the interpreter for programs takes none: {error}") from error
        finally:
            os.close(theirs)
            os.close(program_fd)
        os.set_blocking(ours, False)
        return ours

    async def _read(self, output_fd: int, *, limit: int) -> tuple[bytes, bool]:
        """Read up to ``limit`` bytes of output, and tell whether there was more."""
        received = bytearray()
        done: asyncio.Future[None] = self._loop.create_future()

        def read() -> None:
            chunk = os.read(output_fd, _READ_BYTES)
            received.extend(chunk)
            if (not chunk or len(received) > limit + len(PREPARED)) and not done.done():
                self._loop.remove_reader(output_fd)
                done.set_result(None)

        self._loop.add_reader(output_fd, read)
        try:
            await done
        finally:
            self._loop.remove_reader(output_fd)
        most = limit + len(PREPARED)
        return bytes(received[:most]), len(received) > most

    async def _read_output(
        self, number: int, output_fd: int, *, limits: JailLimits
    ) -> tuple[bytes, bool]:
        """Read the output; kill an execution that has written too much, and tell so."""
        output, is_cut = await self._read(output_fd, limit=limits.output_bytes)
        if is_cut:
            self._ask_to_kill(number)
        return output, is_cut

    @asynccontextmanager
    async def _measured(self, number: int, request: _Request) -> AsyncIterator[None]:
        """Kill an execution whose folder has too much, until the context ends."""

        async def measure() -> None:
            while not request.has_too_much():
                await asyncio.sleep(_MEASURE_S)
            self._ask_to_kill(number)

        measuring = asyncio.create_task(measure()) if request.scratch else None
        try:
            yield
        finally:
            if measuring is not None:
                measuring.cancel()
                await asyncio.wait([measuring])

    def _ask_to_kill(self, number: int) -> None:
        if self.is_open:
            with suppress(OSError):
                self._channel.send(json.dumps({"kill": number}).encode())

    def _receive(self) -> None:
        try:
            message = self._channel.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.kill()
            return
        fields = json.loads(message)
        answer = self._answers.get(fields["number"]) if "number" in fields else self._greeting
        if answer is not None and not answer.done():
            answer.set_result(fields)


def _read_outcome(
    fields: dict[str, object], output: bytes, *, excess: ExecutionEnd | None
) -> Execution:
    if "error" in fields or not output.startswith(PREPARED):
        cause = fields.get("error", "the jail could not be entered")
        raise JailError(f"a program could not be executed: {cause}")
    code, cpu_s = fields["code"], fields["cpu_s"]
    assert isinstance(code, int) and isinstance(cpu_s, float), "the zygote sends numbers"
    text = output[len(PREPARED) :].decode(errors="replace")
    end = excess or _end_of(code, is_late=bool(fields["is_late"]))
    return Execution(end, text, code, cpu_s)


def _end_of(code: int, *, is_late: bool) -> ExecutionEnd:
    if code == 0:
        return ExecutionEnd.DONE
    if code > 0:
        return ExecutionEnd.FAILED
    is_over = is_late or -code == _SIGXCPU
    return ExecutionEnd.TIME if is_over else ExecutionEnd.KILLED
