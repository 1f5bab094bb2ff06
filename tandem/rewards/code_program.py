# SPDX-License-Identifier: Apache-2.0
"""The program that runs a model's program on the inputs of its tests, one limited process each.

It waits for jobs and forks a process for each, which reads its job as JSON and writes one JSON line
for each input. It never sees an expected output, and has imported the standard library alone. Each
process of a program has a folder of its own and limits on CPU time, wall time, memory, files and
output. It is in the jail
(``children.jail``) where the kernel holds it. Elsewhere it gets a network without devices and
process numbers of its own if the kernel permits that, and can read the files of its user.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
import types
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO, Any

from tandem.children.jail import (
    JailLimits,
    Layers,
    become_other_user,
    enter,
    hand_over,
    readable_paths,
)
from tandem.children.jail_trial import find_layers, lost_protections, try_protections
from tandem.children.scratch import ScratchPlace, has_too_much

OPEN_NAMES = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools "
    "operator io sys json builtins typing"
)
"""The modules whose names a program may use without an import, as under verl."""
MAX_PROCESSES = 16
POLL_S = 0.01
MESSAGE_BYTES = 64
MIB = 1 << 20
_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000  # user, network, processes, IPC
_PR_SET_PDEATHSIG = 1
_RESULT_FD = 50
_PREPARED_FD = 51
_MAX_FD = 4096
_RECURSION_LIMIT = 600_000
_MOST_PREPARING_S = 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Program:
    """A program with its files; a byte on ``prepared`` tells that its limits are set.

    Attributes:
        parent: the process that forks it.
    """

    job: dict[str, Any]
    given: IO[bytes]
    written: IO[bytes]
    prepared: int
    folder: str
    parent: int

    @property
    def folder_bytes(self) -> int:
        """The size of its files together."""
        return self.job["output_bytes"] + MIB


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The things that all programs of a job have in common.

    Attributes:
        names: names that they may use without an import.
        layers: the layers of protection that they can put on.
        is_jailed: whether these are enough for the jail.
        place: the place of their folders.
    """

    names: dict[str, Any]
    layers: Layers
    is_jailed: bool
    readable: tuple[str, ...]
    place: ScratchPlace


def main(channel_fd: int) -> None:
    """Run jobs until the other end of the channel closes, or the parent process ends."""
    _end_with_parent()
    surroundings = _find_surroundings()
    gc.freeze()  # else the collector of a forked process would write to all pages
    with socket.socket(fileno=channel_fd) as channel:
        channel.set_inheritable(False)
        while True:
            message, descriptors, *_ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
            if not message:
                return
            parent = os.getpid()
            worker = os.fork()
            if worker == 0:
                channel.close()
                _serve(descriptors, surroundings, parent=parent)
            for descriptor in descriptors:
                os.close(descriptor)
            _, status = os.waitpid(worker, 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())


def _serve(descriptors: list[int], surroundings: Surroundings, *, parent: int) -> None:
    """Turn this forked process into that of a job: it does not return."""
    code = 1
    try:
        _end_with_parent()
        given, written, errors = descriptors
        os.dup2(errors, 2)
        os.close(errors)
        if os.getppid() == parent:  # else it has ended before it was asked to end this process
            if not surroundings.is_jailed:
                _go_first()
            _run_all(given, written, surroundings=replace(surroundings, place=ScratchPlace()))
            code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def _go_first() -> None:
    """Let this process, but not those that it forks, run before all others, if it may.

    A program whose processes the kernel does not limit would not let it count them otherwise.
    """
    with suppress(OSError):  # root may do so
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def _run_all(given: int, written: int, *, surroundings: Surroundings) -> None:
    with os.fdopen(given, "rb") as file:
        job = json.load(file)
    give_up_at_s = time.monotonic() + job["budget_s"]
    with os.fdopen(written, "w") as answers:
        for entry in job["inputs"]:
            left_s = give_up_at_s - time.monotonic()
            answer = {"end": "budget"}
            if left_s > 0:
                answer = _run(job, entry, surroundings=surroundings, left_s=left_s)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _find_surroundings() -> Surroundings:
    folders = sysconfig.get_paths()
    readable = readable_paths(sorted({folders["purelib"], folders["platlib"]}))
    layers = find_layers()
    is_held = not lost_protections(try_protections(layers, readable))
    names = _open_names()
    return Surroundings(names, layers, is_held, readable, ScratchPlace())


def _run(job: dict[str, Any], entry: Any, *, surroundings: Surroundings, left_s: float) -> Any:
    """Run the program on one input; return how it ended and what it wrote."""
    folder = surroundings.place.make()
    # A file without a place, so that a program in the jail may open /dev/stdin.
    with memory_file() as given, tempfile.TemporaryFile() as written:
        given.write(entry.encode() if job["fn_name"] is None else json.dumps(entry).encode())
        given.seek(0)
        ready, prepared = os.pipe()
        program = Program(job, given, written, prepared, folder, os.getpid())
        outer = os.fork()
        if outer == 0:
            _become(program, surroundings)
        os.close(prepared)
        try:
            end = _wait(outer, program, ready=ready, wall_s=min(left_s, job["wall_s"]))
            if not os.read(ready, 1):
                raise RuntimeError("a process for a program could not be prepared")
        finally:
            os.close(ready)
            surroundings.place.remove(folder)
        written.seek(0)
        output = written.read(job["output_bytes"] + 1)
    if len(output) > job["output_bytes"]:
        return {"end": "output"}
    return {"end": end, "output": output.decode(errors="replace")}


def memory_file() -> IO[bytes]:
    """Return a new file in memory, without a name."""
    return os.fdopen(os.memfd_create("job"), "w+b")


def _wait(outer: int, program: Program, *, ready: int, wall_s: float) -> str:
    """Wait for the program; kill it when its time, processes, memory or files are used up.

    Args:
        ready: the pipe that has a byte once the program is about to begin, as does its time.
    """
    is_ready, deadline_s = False, time.monotonic() + _MOST_PREPARING_S
    while True:
        pid, status = os.waitpid(outer, os.WNOHANG)
        if pid:
            return "done" if status == 0 else "error"
        if not is_ready and select.select([ready], [], [], 0)[0]:
            is_ready, deadline_s = True, time.monotonic() + wall_s
        end = "time" if time.monotonic() > deadline_s else _excess(outer, program)
        if end:
            _kill(outer)
            os.waitpid(outer, 0)
            return end
        time.sleep(POLL_S)


def _excess(outer: int, program: Program) -> str:
    """Return what the processes of a program have too much of, or nothing."""
    if has_too_much(program.folder, max_bytes=program.folder_bytes):
        return "files"
    max_bytes = program.job["memory_mb"] * MIB
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


def _become(program: Program, surroundings: Surroundings) -> None:
    """Turn this forked process into the program: it does not return."""
    code = 1
    try:
        if surroundings.is_jailed:
            arguments = _connect(program)
            _limit(program)
            _enter_jail(program, surroundings.layers, readable=surroundings.readable)
            code = _execute(program, surroundings.names, arguments=arguments)
        else:
            code = _become_apart(program, surroundings)
    finally:
        os._exit(code)


def _enter_jail(program: Program, layers: Layers, *, readable: tuple[str, ...]) -> None:
    limits = JailLimits(
        cpu_s=program.job["cpu_s"],
        memory_bytes=4 * program.job["memory_mb"] * MIB,
        scratch_bytes=program.folder_bytes,
    )
    enter(limits, layers, parent=program.parent, readable=readable, scratch=program.folder)


def _become_apart(program: Program, surroundings: Surroundings) -> int:
    """Execute the program outside of a jail; return its exit code.

    It has a user and namespaces of its own where it may. The kernel does not limit the number of
    root's processes, and thousands may be there before this one's parent has counted them.
    """
    has_own_user = surroundings.layers.user
    _end_with_parent()
    os.setsid()
    os.chdir(program.folder)
    if has_own_user:
        become_other_user(hand_over(program.folder))
        _end_with_parent()  # again, as the change of user clears it
    is_apart = _LIBC.unshare(_NAMESPACES) == 0  # where the kernel permits it
    inner = os.fork()
    if inner:
        _, status = os.waitpid(inner, 0)
        return 0 if status == 0 else 1
    _end_with_parent()
    arguments = _connect(program)
    _limit(program)
    if is_apart or has_own_user:  # else it would count all processes of the user
        _lower(resource.RLIMIT_NPROC, MAX_PROCESSES)
    return _execute(program, surroundings.names, arguments=arguments)


def _limit(program: Program) -> None:
    memory = program.job["memory_mb"] * MIB
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: program.job["cpu_s"],
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_AS: 4 * memory,
        resource.RLIMIT_FSIZE: program.folder_bytes,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, limit in limits.items():
        _lower(kind, limit)


def _lower(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    lower = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (lower, lower))


def _connect(program: Program) -> list[Any]:
    """Give a program its input and output, and a function nothing but a place for its result.

    Returns:
        The arguments of the function.
    """
    is_function = program.job["fn_name"] is not None
    arguments = json.load(program.given) if is_function else []
    nowhere = os.open(os.devnull, os.O_RDWR)
    ends = (nowhere, nowhere) if is_function else (program.given.fileno(), program.written.fileno())
    os.dup2(program.written.fileno(), _RESULT_FD)
    os.dup2(program.prepared, _PREPARED_FD)
    for descriptor, end in enumerate((*ends, nowhere)):
        os.dup2(end, descriptor)
    os.closerange(3, _RESULT_FD if is_function else _PREPARED_FD)
    os.closerange(_PREPARED_FD + 1, _MAX_FD)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "r" if n == 0 else "w") for n in range(3))
    return arguments


def _execute(program: Program, names: dict[str, Any], *, arguments: list[Any]) -> int:
    """Execute the program in this process; return 0 if it ends by itself."""
    fn_name = program.job["fn_name"]
    os.write(_PREPARED_FD, b"1")
    os.close(_PREPARED_FD)
    tempfile.tempdir = os.getcwd()
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
