# SPDX-License-Identifier: Apache-2.0
"""The program of an interpreter that forks itself for each execution of code of a model.

It has one thread, no secrets and an empty environment, and has imported what programs usually need,
so that an execution costs a few milliseconds. It sees neither programs nor their output: the parent
passes descriptors for both, and the forked process reads its program after it has entered the jail.
Jailed processes cannot fork, so that one kill ends an execution. This process ends when its channel
closes, and they end with it. It imports the standard library alone.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import gc
import importlib
import json
import linecache
import os
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from code import InteractiveInterpreter
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from tandem.children.jail import JailLimits, Layers, enter, readable_paths
from tandem.children.jail_trial import find_layers, try_protections

STANDARD_MODULES = (
    *("ast", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions"),
    *("functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics"),
    *("string", "textwrap", "typing"),
)
"""The modules that are imported before programs, which need no import of theirs to be fast."""
MESSAGE_BYTES = 1 << 16
PREPARED = b"\x01"
"""The first byte of the output: the process is in the jail, and has not begun the program."""
_PROGRAM_NAME = "program.py"
_PROGRAM_FD = 3
_PRINT_VALUE = "__print_value__"
_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class _Running:
    """An execution: its process, and the time at which it is killed."""

    number: int
    pid: int
    pid_fd: int
    deadline_s: float


def main(channel_fd: int) -> None:
    """Serve executions until the other end of the channel closes."""
    _LIBC.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    channel = socket.socket(fileno=channel_fd)
    channel.set_inheritable(False)
    setup: dict[str, Any] = json.loads(channel.recv(MESSAGE_BYTES) or b"{}")
    if not setup:
        return
    # Programs import what is installed, and not this package's folder.
    sys.path[:] = [*sys.path[1:], *setup["packages"]]
    try:
        for name in (*STANDARD_MODULES, *setup["modules"]):
            importlib.import_module(name)
    except ImportError as error:
        channel.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    readable = readable_paths(setup["packages"])
    layers = find_layers()
    protections = try_protections(layers, readable)
    channel.send(json.dumps({"protections": [asdict(one) for one in protections]}).encode())
    gc.collect()
    gc.freeze()  # else the collector of a forked process would write to all pages
    _Zygote(channel, layers, readable=readable).serve()


class _Zygote:
    """The executions of this process."""

    def __init__(
        self, channel: socket.socket, layers: Layers, *, readable: tuple[str, ...]
    ) -> None:
        self._pid = os.getpid()
        self._channel = channel
        self._layers = layers
        self._readable = readable
        self._running: dict[int, _Running] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, None)

    def serve(self) -> None:
        """Start, end and report executions until the channel closes."""
        while True:
            nearest_s = min((one.deadline_s for one in self._running.values()), default=None)
            wait_s = None if nearest_s is None else max(0.0, nearest_s - time.monotonic())
            for key, _ in self._selector.select(wait_s):
                if key.data is not None:
                    self._report(key.data)
                elif not self._receive():
                    return
            now_s = time.monotonic()
            for one in self._running.values():
                if one.deadline_s <= now_s:
                    os.kill(one.pid, signal.SIGKILL)

    def _receive(self) -> bool:
        """Handle a message; return whether the channel is still open."""
        try:
            message, descriptors, *_ = socket.recv_fds(self._channel, MESSAGE_BYTES, 2)
        except ConnectionError:
            return False
        if not message:
            return False
        request = json.loads(message)
        if "kill" in request:
            one = self._running.get(request["kill"])
            if one is not None:
                os.kill(one.pid, signal.SIGKILL)
            return True
        program_fd, output_fd = descriptors
        try:
            self._start(request, program_fd=program_fd, output_fd=output_fd)
        except OSError as error:  # the machine has no process for it
            name = errno.errorcode.get(error.errno or 0, str(error))
            self._answer(request["number"], {"error": name})
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _start(self, request: dict[str, Any], *, program_fd: int, output_fd: int) -> None:
        limits = JailLimits(**request["limits"])
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _connect(program_fd=program_fd, output_fd=output_fd)
                code = self._execute(request, limits)
            finally:
                os._exit(code)
        deadline_s = time.monotonic() + limits.wall_s
        one = _Running(request["number"], pid, os.pidfd_open(pid), deadline_s)
        self._running[one.number] = one
        self._selector.register(one.pid_fd, selectors.EVENT_READ, one)

    def _report(self, one: _Running) -> None:
        _, status, usage = os.wait4(one.pid, 0)
        del self._running[one.number]
        self._selector.unregister(one.pid_fd)
        os.close(one.pid_fd)
        fields = {
            "code": os.waitstatus_to_exitcode(status),
            "is_late": time.monotonic() >= one.deadline_s,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }
        self._answer(one.number, fields)

    def _answer(self, number: int, fields: dict[str, Any]) -> None:
        # The channel may have closed meanwhile, as the next message tells.
        with suppress(OSError):
            self._channel.send(json.dumps({"number": number, **fields}).encode())

    def _execute(self, request: dict[str, Any], limits: JailLimits) -> int:
        """Turn this forked process into an execution; return its exit code."""
        scratch = request["scratch"]
        enter(limits, self._layers, parent=self._pid, readable=self._readable, scratch=scratch)
        if scratch:
            tempfile.tempdir = os.getcwd()
        with os.fdopen(_PROGRAM_FD, "rb") as file:
            source = file.read().decode()
        os.write(1, PREPARED)
        return run_program(source, prints_last=request["prints_last"])


def _connect(*, program_fd: int, output_fd: int) -> None:
    """Close all descriptors but the program's and the output's."""
    program_fd = os.dup(program_fd)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    if program_fd != _PROGRAM_FD:
        os.dup2(program_fd, _PROGRAM_FD)
    os.closerange(_PROGRAM_FD + 1, os.sysconf("SC_OPEN_MAX"))
    # Written lines are not lost when the program is killed.
    sys.stdin, sys.stdout, sys.stderr = (
        os.fdopen(fd, "r" if fd == 0 else "w", 1, encoding="utf-8", errors="replace")
        for fd in range(3)
    )


class _Interpreter(InteractiveInterpreter):
    """An interpreter that prints the traceback of a program, and notes that it failed."""

    has_failed = False

    def showtraceback(self) -> None:
        """Print the exception that is handled, without the frame of the interpreter."""
        _, error, trace = sys.exc_info()
        self.has_failed = True
        sys.stdout.flush()
        traceback.print_exception(None, error, trace and trace.tb_next)


def run_program(source: str, *, prints_last: bool) -> int:
    """Execute a program as Python's main program; return its exit code.

    Args:
        prints_last: print the value of an expression that ends the program, as a notebook does.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [_PROGRAM_NAME]
    # Tracebacks show lines of the program, which is no file.
    linecache.cache[_PROGRAM_NAME] = (len(source), None, source.splitlines(True), _PROGRAM_NAME)
    interpreter = _Interpreter(module.__dict__)
    try:
        tree = ast.parse(source, _PROGRAM_NAME)
        if prints_last and tree.body and isinstance(tree.body[-1], ast.Expr):
            module.__dict__[_PRINT_VALUE] = _print_value
            tree.body[-1] = _printed(tree.body[-1])
        compiled = compile(tree, _PROGRAM_NAME, "exec")
    except (SyntaxError, ValueError, OverflowError, MemoryError, RecursionError) as error:
        traceback.print_exception(None, error, None)
        return 1
    try:
        interpreter.runcode(compiled)
        code = int(interpreter.has_failed)
    except SystemExit as end:
        code = _exit_code(end)
    _finish_threads()
    sys.stdout.flush()
    return code


def _printed(last: ast.Expr) -> ast.Expr:
    call = ast.Call(ast.Name(_PRINT_VALUE, ast.Load()), [last.value], [])
    return ast.fix_missing_locations(ast.copy_location(ast.Expr(call), last))


def _print_value(value: object) -> None:
    if value is not None:
        text = f"{value}\n"
        sys.stdout.flush()
        os.write(1, text.encode(errors="replace"))


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stdout.flush()
    os.write(2, f"{end.code}\n".encode(errors="replace"))
    return 1


def _finish_threads() -> None:
    """Wait for the threads of the program, as Python does at its end."""
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
