# SPDX-License-Identifier: Apache-2.0
"""The child process that holds SGLang's engine, as the worker sees it.

A call waits for its answer, and for signs of progress meanwhile. A process that ends, or that does
not report for too long, is killed with its children, and the call raises EngineDied. What SGLang
prints goes to a log, which errors name. It is removed at the end of an engine without errors.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkstemp
from typing import Any

import tandem
from tandem.api import EngineDied, EngineFailure
from tandem.children.child import LENGTH_BYTES
from tandem.children.process import start_interpreter
from tandem.platforms.environment import inherited

logger = logging.getLogger(__name__)

PROGRAM = "tandem.rollout.sglang.program"
START_S = 900.0
"""The longest that SGLang may take to start and for its first sequences: it may compile kernels."""
STALL_S = 60.0
"""The shortest time without progress after which a call fails."""
STALL_FACTOR = 20
"""A call also fails only after so many times the longest wait for progress so far."""
SLOW_S, SLOW_FACTOR = 8.0, 2
"""A call that waits for so long, and for so many times the longest wait so far, is named."""
_AWAKE_S = 1.0
_EXIT_S = 10.0
_READ_BYTES = 1 << 20
_READ_LOG_BYTES = 1 << 16
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception): .+", re.MULTILINE)
_SHOWN = 300
"""The number of characters of an error that is shown."""
_OWN_PATH = ("PYTHONPATH", "PYTHONHOME")
ENVIRONMENT: Mapping[str, str] = {
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # SGLang keeps one position free; the run itself keeps to the positions of the model.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
}
"""Variables of the process, unless the user has set them."""
_REFUSED = ("SGLANG_RETURN_ORIGINAL_LOGPROB",)


def _cpu_environment(num_schedulers: int) -> dict[str, str]:
    """Return the variables for CPUs. Without the second one, each scheduler needs a NUMA node."""
    variables = {"SGLANG_USE_CPU_ENGINE": "1"}
    if num_schedulers == 1:
        return variables
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_schedulers)
    parts = [cores[index * share % len(cores) :][:share] for index in range(num_schedulers)]
    bound = "|".join(",".join(map(str, part)) for part in parts)
    return variables | {"SGLANG_CPU_OMP_THREADS_BIND": bound}


class Cleaner:
    """A process that removes files if this process ends without closing its engine, as by a kill.

    It reads a pipe whose other end this process holds.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Start it for folders and files."""
        program = 'while read -r _; do :; done; exec rm -rf -- "$@"'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", program, "sh", *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End it; the files stay."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None, "it reads a pipe"
        self._process.stdin.close()


class SglangProcess:
    """A running child process. Calls do not overlap.

    Args:
        interpreter: the Python that has SGLang.
        first: the first message; see ``program.Program``.
        memory_fd: the descriptor of the shared memory for weights.
        num_schedulers: the number of SGLang's processes that compute.
        stall_s: see ``STALL_S``.
    """

    def __init__(
        self,
        interpreter: str,
        *,
        first: Mapping[str, Any],
        memory_fd: int,
        on_cpu: bool,
        num_schedulers: int = 1,
        stall_s: float = STALL_S,
    ) -> None:
        environment = inherited(without=_OWN_PATH + _REFUSED)
        extra = dict(ENVIRONMENT)
        if on_cpu:
            extra |= _cpu_environment(num_schedulers)
        self._incoming = b""
        self._is_closed = False
        self._stall_s, self._longest_s = stall_s, START_S / STALL_FACTOR
        self._is_warm = False
        log_fd, name = mkstemp(prefix="tandem-sglang-", suffix=".log")
        self._log = Path(name)
        self._folder = TemporaryDirectory(prefix="tandem-sglang-", ignore_cleanup_errors=True)
        folder = self._folder.name
        self._cleaner = Cleaner([folder, name])
        # Nothing but tandem: its neighbours are packages of other versions than SGLang's.
        Path(folder, "tandem").symlink_to(Path(tandem.__file__).parent)
        self._channel, self._lifeline_fd, self._process = start_interpreter(
            PROGRAM,
            environment=extra | environment,
            interpreter=interpreter,
            path=[folder],
            descriptors=[memory_fd],
            log_fd=log_fd,
        )
        os.close(log_fd)
        self.facts: dict[str, Any] = self._exchange({**first, "folder": folder})

    @property
    def pid(self) -> int:
        """The process, which leads the group of all its children."""
        return self._process.pid

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Run a call of ``program.Program``, and return its result.

        Raises:
            EngineDied: SGLang ended, or made no progress.
            EngineFailure: it raised an exception.
        """
        result = self._exchange({"call": name, "arguments": dict(arguments)})
        if name == "advance" and not self._is_warm:
            self._is_warm, self._longest_s = True, 0.0  # kernels are compiled
        return result

    def close(self) -> None:
        """Kill the process and its children, wait for them and remove the log; idempotent."""
        if not self._is_closed:
            self._end()
            self._log.unlink(missing_ok=True)

    def _end(self) -> None:
        self._is_closed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._channel.close()
        os.close(self._lifeline_fd)
        self._cleaner.dismiss()
        self._folder.cleanup()
        try:
            self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired as error:
            raise EngineFailure(f"SGLang: process {self._process.pid} does not end") from error

    def _exchange(self, message: Mapping[str, Any]) -> Any:
        if self._is_closed:
            raise EngineDied("SGLang has ended")
        self._send(message)
        while True:
            answer = json.loads(self._receive_line())
            if "error" in answer:
                self._end()
                raise EngineFailure(f"SGLang: {answer['error']}{self._see_log()}")
            if "result" in answer:
                return answer["result"]

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message. The process may stand still for as long as it may be silent."""
        data, limit_s = json.dumps(message).encode(), self._limit_s()
        self._channel.settimeout(limit_s)
        try:
            self._channel.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        except TimeoutError:
            raise self._stalled(limit_s) from None
        except ConnectionError:
            raise self._ended() from None
        self._channel.settimeout(None)

    def _limit_s(self) -> float:
        return max(self._stall_s, STALL_FACTOR * self._longest_s)

    def _receive_line(self) -> bytes:
        """Wait for a line as long as a process may be silent."""
        begun = time.monotonic()
        limit_s = self._limit_s()
        named_s = max(SLOW_S, SLOW_FACTOR * self._longest_s) if self._is_warm else limit_s
        waits_s = [limit_s] if named_s >= limit_s else [limit_s, named_s]
        while b"\n" not in self._incoming:
            if not self._is_readable(until_s=begun + waits_s[-1]):
                waited_s = waits_s.pop()
                if waits_s:
                    logger.warning(
                        "SGLang has made no progress for %.0f s. After %.0f s, its processes "
                        "(group %d) are killed",
                        waited_s,
                        limit_s,
                        self.pid,
                    )
                    continue
                raise self._stalled(limit_s)
            try:
                received = self._channel.recv(_READ_BYTES)
            except ConnectionError:
                received = b""
            if not received:
                raise self._ended()
            self._incoming += received
        if self._is_warm:
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
        line, _, self._incoming = self._incoming.partition(b"\n")
        return line

    def _is_readable(self, *, until_s: float) -> bool:
        """Wait for data of the process until a time; return whether there is some.

        This thread computes a little each second: a worker whose call computes nothing for longer
        than ``nccl_timeout`` counts as hanging, and SGLang's start has a longer limit of its own.
        """
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            if select.select([self._channel], [], [], min(_AWAKE_S, left_s))[0]:
                return True
            if left_s <= _AWAKE_S:
                return False

    def _stalled(self, limit_s: float) -> EngineDied:
        """Return the error of a process that stands still, and end it and its children."""
        self._end()
        return EngineDied(
            f"SGLang made no progress for {limit_s:.0f} s and was killed{self._see_log()}"
        )

    def _ended(self) -> EngineDied:
        """Return the error of a process that has ended, and end its children."""
        try:
            code = self._process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            code = 0
        self._end()
        how = (
            f"killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        return EngineDied(f"SGLang: process {how}{self._last_error()}{self._see_log()}")

    def _last_error(self) -> str:
        """Return the part of an error that repeats the last one in the log; "" if there is none."""
        if not self._log.exists():
            return ""
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _READ_LOG_BYTES))
            errors: list[str] = _ERROR.findall(log.read().decode(errors="replace"))
        return f"; its last error: {errors[-1].strip()[:_SHOWN]}" if errors else ""

    def _see_log(self) -> str:
        """Return the part of an error that names the log; "" if nothing was written to it."""
        if self._log.exists() and self._log.stat().st_size:
            return f"; its output is in {self._log}"
        self._log.unlink(missing_ok=True)
        return ""
