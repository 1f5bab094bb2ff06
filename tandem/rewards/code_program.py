# SPDX-License-Identifier: Apache-2.0
"""The script that runs a model's program on the inputs of its tests, one limited process each.

It reads a job as JSON from stdin and writes one JSON line for each input. It never sees an expected
output, and is run by path in a fresh interpreter: it imports the standard library alone. Processes
get a folder of their own, limits on CPU time, wall time, memory, files and output, and where the
kernel permits it a network without devices and process numbers of their own, so that everything a
program starts ends with it. It is no sandbox: a program can read the files that its user can read.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from dataclasses import dataclass
from typing import IO, Any

OPEN_NAMES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
"""The modules whose names a program may use without an import, as under verl."""
MAX_PROCESSES = 16
POLL_S = 0.01
MIB = 1 << 20
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000  # user, network, processes, IPC
_PR_SET_PDEATHSIG = 1
_RESULT_FD = 50
_MAX_FD = 4096
_RECURSION_LIMIT = 600_000
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its files; a byte on ``prepared`` tells that its limits are set."""

    job: dict[str, Any]
    given: IO[bytes]
    written: IO[bytes]
    prepared: int
    folder: str


def main() -> None:
    """Run the job; end with the parent process."""
    _end_with_parent()
    job = json.load(sys.stdin)
    names = _open_names()
    give_up_at_s = time.monotonic() + job["budget_s"]
    with os.fdopen(1, "w", closefd=False) as answers:
        for entry in job["inputs"]:
            left_s = give_up_at_s - time.monotonic()
            answer = {"end": "budget"}
            if left_s > 0:
                answer = _run(job, entry, names=names, left_s=left_s)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _run(job: dict[str, Any], entry: Any, *, names: dict[str, Any], left_s: float) -> Any:
    """Run the program on one input; return how it ended and what it wrote."""
    folder = tempfile.mkdtemp(prefix="tandem-program-")
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as written:
        given.write(entry.encode() if job["fn_name"] is None else json.dumps(entry).encode())
        given.seek(0)
        ready, prepared = os.pipe()
        outer = os.fork()
        if outer == 0:
            program = Program(job, given, written, prepared, folder)
            _become(program, names)
        os.close(prepared)
        try:
            end = _wait(outer, min(left_s, job["wall_s"]), max_bytes=job["memory_mb"] * MIB)
            if not os.read(ready, 1):
                raise RuntimeError("a process for a program could not be prepared")
        finally:
            os.close(ready)
            shutil.rmtree(folder, ignore_errors=True)
        written.seek(0)
        output = written.read(job["output_bytes"] + 1)
    if len(output) > job["output_bytes"]:
        return {"end": "output"}
    return {"end": end, "output": output.decode(errors="replace")}


def _wait(outer: int, wall_s: float, *, max_bytes: int) -> str:
    """Wait for the program; kill it when its time, its processes or their memory are used up."""
    deadline_s = time.monotonic() + wall_s
    while True:
        pid, status = os.waitpid(outer, os.WNOHANG)
        if pid:
            return "done" if status == 0 else "error"
        end = "time" if time.monotonic() > deadline_s else _excess(outer, max_bytes)
        if end:
            _kill(outer)
            os.waitpid(outer, 0)
            return end
        time.sleep(POLL_S)


def _excess(outer: int, max_bytes: int) -> str:
    """Return what the processes of a program have too much of, or nothing."""
    pids = _descendants(outer)
    if len(pids) > MAX_PROCESSES:
        return "processes"
    # One process has its own limit; forks share the interpreter's pages.
    return "memory" if len(pids) > 1 and sum(map(_private_bytes, pids)) > max_bytes else ""


def _private_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
    except OSError:
        return 0
    return (resident - shared) * resource.getpagesize()


def _kill(outer: int) -> None:
    for pid in (*_descendants(outer), outer):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        if len(found) > 2 * MAX_PROCESSES:
            break
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as children:
                found += map(int, children.read().split())
        except OSError:
            continue
    return found[1:]


def _become(program: Program, names: dict[str, Any]) -> None:
    """Turn this forked process into the program: it does not return."""
    code = 1
    try:
        _end_with_parent()
        os.setsid()
        is_apart = _LIBC.unshare(_NAMESPACES) == 0  # where the kernel permits it
        inner = os.fork()
        if inner:
            _, status = os.waitpid(inner, 0)
            code = 0 if status == 0 else 1
        else:
            _end_with_parent()
            _limit(program, is_apart=is_apart)
            os.write(program.prepared, b"1")
            code = _execute(program, names)
    finally:
        os._exit(code)


def _limit(program: Program, *, is_apart: bool) -> None:
    os.chdir(program.folder)
    tempfile.tempdir = program.folder
    memory = program.job["memory_mb"] * MIB
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: program.job["cpu_s"],
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: 4 * memory,
        resource.RLIMIT_FSIZE: program.job["output_bytes"] + MIB,
        resource.RLIMIT_NOFILE: 64,
    }
    if is_apart:  # else it would count all processes of the user
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lower, lower))


def _execute(program: Program, names: dict[str, Any]) -> int:
    """Execute the program in this process; return 0 if it ends by itself."""
    fn_name = program.job["fn_name"]
    arguments = [] if fn_name is None else json.load(program.given)
    _connect(program, is_function=fn_name is not None)
    sys.argv = ["program.py"]
    sys.setrecursionlimit(_RECURSION_LIMIT)
    module = types.ModuleType("__main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = module
    try:
        exec(compile(program.job["source"], "program.py", "exec"), module.__dict__)
        if fn_name is not None:
            result = _find(module, fn_name)(*arguments)
            os.write(_RESULT_FD, json.dumps(result).encode())
    except SystemExit:
        if fn_name is not None:
            return 1
    sys.stdout.flush()
    return 0


def _connect(program: Program, *, is_function: bool) -> None:
    """Give a program its input and output, and a function nothing but a place for its result."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    ends = (nowhere, nowhere) if is_function else (program.given.fileno(), program.written.fileno())
    os.dup2(program.written.fileno(), _RESULT_FD)
    for descriptor, end in enumerate((*ends, nowhere)):
        os.dup2(end, descriptor)
    os.closerange(3, _RESULT_FD if is_function else _RESULT_FD + 1)
    os.closerange(_RESULT_FD + 1, _MAX_FD)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "r" if n == 0 else "w") for n in range(3))


def _find(module: types.ModuleType, name: str) -> Any:
    solution = getattr(module, "Solution", None)
    if solution is not None and hasattr(solution, name):
        return getattr(solution(), name)
    return getattr(module, name)


def _open_names() -> dict[str, Any]:
    names: dict[str, Any] = {}
    modules = {name: importlib.import_module(name) for name in OPEN_NAMES.split()}
    for module in modules.values():
        public = getattr(module, "__all__", [name for name in vars(module) if name[0] != "_"])
        names.update({name: getattr(module, name) for name in public})
    return names | modules


def _end_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
