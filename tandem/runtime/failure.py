# SPDX-License-Identifier: Apache-2.0
"""Failures of workers, and the choice of the first cause among several.

When one process ends, its peers lose their connections to it and also raise, sometimes before its
end is noticed. Failures are therefore ranked by kind first, and by time only within a kind.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tandem.api import EngineFailure
from tandem.errors import UserError


class Kind(IntEnum):
    """The kind of a failure. The lowest of several is most likely the first cause."""

    DIED = 0
    HANGS = 1
    RAISED = 2
    LOST_PEER = 3


@dataclass(frozen=True, slots=True)
class Symptom:
    """The failure of one worker as plain values, which can be pickled.

    Attributes:
        cause: the cause in one line.
        traceback_text: the traceback, or the last lines that a dead process wrote; may be "".
        time_s: seconds since the epoch, by the clock of the process that noticed.
        is_user_error: whether ``cause`` is the text of a UserError.
    """

    kind: Kind
    cause: str
    traceback_text: str
    time_s: float
    is_user_error: bool = False


class ReportedError(Exception):
    """The exception that leaves a worker. The original one might not be picklable."""

    def __init__(self, symptom: Symptom) -> None:
        super().__init__(symptom)
        self.symptom = symptom


@dataclass(frozen=True, slots=True)
class WorkerName:
    """The name of a worker in messages. ``pid`` is 0 before the worker has answered."""

    pool: str
    rank: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"{self.pool} rank {self.rank} (host {self.host}, pid {self.pid})"


class WorkerFailure(Exception):
    """A worker died, hangs or raised. The first line is the whole message; a traceback follows.

    Attributes:
        pool, rank, host, pid: the worker.
        method: the call that failed; "" if the worker died between calls.
        cause: the cause in one line.
        traceback_text: the worker's traceback, or the last lines that a dead one wrote; may be "".
    """

    def __init__(self, worker: WorkerName, method: str, *, symptom: Symptom) -> None:
        self.pool = worker.pool
        self.rank = worker.rank
        self.host = worker.host
        self.pid = worker.pid
        self.method = method
        self.cause = symptom.cause
        self.traceback_text = symptom.traceback_text
        verb = {Kind.DIED: "died", Kind.HANGS: "hangs"}.get(symptom.kind, "failed")
        during = f" in {method}" if method else ""
        line = f"{worker} {verb}{during}: {symptom.cause}"
        super().__init__("\n".join([line, self.traceback_text]).rstrip())


class NodeFailure(Exception):
    """The end of a run because of a node: the head vanished, or the node's own Ray ended.

    Attributes:
        restarts_elsewhere: whether the head starts the run again, so that this node must follow.
    """

    def __init__(self, text: str, *, restarts_elsewhere: bool = False) -> None:
        super().__init__(text)
        self.restarts_elsewhere = restarts_elsewhere


@dataclass(frozen=True, slots=True)
class Failed:
    """A symptom, its worker, and the call that was running, "" without one."""

    worker: WorkerName
    method: str
    symptom: Symptom


def first_failed(failures: Sequence[Failed]) -> Failed:
    """Return the failure that most likely caused the others."""
    return min(failures, key=lambda failed: (failed.symptom.kind, failed.symptom.time_s))


def as_exception(failed: Failed) -> Exception:
    """Return the exception for the driver to raise: a worker's UserError, or a WorkerFailure."""
    if failed.symptom.is_user_error:
        return UserError(failed.symptom.cause)
    return WorkerFailure(failed.worker, failed.method, symptom=failed.symptom)


_LOST_PEER_TYPES = frozenset(
    {"ConnectionError", "DistBackendError", "DistNetworkError", "DistStoreError", "GroupError"}
)
_LOST_PEER_TEXT = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|remote process (has )?exited"
    r"|timed? ?out|connectFullMesh|socket|peer|another rank .* has ended",
    re.IGNORECASE,
)

_MEMORY_REMEDY = (
    " Set actor_rollout_ref.model.enable_gradient_checkpointing=True (of tandem sft: "
    "model.enable_gradient_checkpointing), lower actor_rollout_ref.actor.ppo_max_token_len_per_gpu "
    "(of tandem sft: data.max_token_len_per_gpu) or "
    "actor_rollout_ref.rollout.gpu_memory_utilization, and run the same command again: it resumes "
    "from the last checkpoint."
)
"""Peers wait for this process in a collective: unlike on one device, the step cannot be repeated
with smaller micro-batches.
"""


def symptom_of(error: Exception, *, time_s: float) -> Symptom:
    """Return the symptom of an exception: its name and text, since not all are picklable."""
    names = {base.__name__ for base in type(error).__mro__}
    text = " ".join(str(error).split()) or type(error).__name__
    is_user_error = isinstance(error, UserError)
    remedy = _MEMORY_REMEDY if "OutOfMemoryError" in names else ""
    # Plain RuntimeErrors are how most collectives report that a peer is gone. Engines over several
    # processes quote them.
    tells_of_peers = type(error) is RuntimeError or isinstance(error, EngineFailure)
    is_lost_peer = bool(names & _LOST_PEER_TYPES) or (
        tells_of_peers and bool(_LOST_PEER_TEXT.search(text))
    )
    return Symptom(
        kind=Kind.LOST_PEER if is_lost_peer else Kind.RAISED,
        cause=text if is_user_error else f"{type(error).__name__}: {text}{remedy}",
        # The one line of an EngineFailure is complete.
        traceback_text=""
        if isinstance(error, EngineFailure)
        else "".join(traceback.format_exception(error)).rstrip(),
        time_s=time_s,
        is_user_error=is_user_error,
    )


_NODE_LOST = re.compile(r"node (has died|was terminated)|health check failed|heartbeats")
_OUT_OF_MEMORY = re.compile(r"running low on memory|OutOfMemory|memory pressure", re.IGNORECASE)

_SAID = "error: "


def cause_of_death(ray_text: str, last_lines: str = "") -> str:
    """Return one line for Ray's long text about an actor that has ended.

    Args:
        last_lines: the end of what the process wrote. A process that ends itself says why in the
            last line, behind ``error:``.
    """
    if _OUT_OF_MEMORY.search(ray_text):
        return "it was ended because its node ran out of memory"
    if _NODE_LOST.search(ray_text):
        return "its node was lost (the machine or the network to it is down)"
    if "SYSTEM_ERROR" in ray_text:
        said = last_lines.rstrip().rpartition("\n")[2]
        if said.startswith(_SAID):
            return said.removeprefix(_SAID)
        return "its process ended unexpectedly (killed, or crashed)"
    detail = ray_text.partition("Worker exit detail:")[2] or ray_text
    return " ".join(detail.split())[:300]
