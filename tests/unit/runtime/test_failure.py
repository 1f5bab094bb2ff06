# SPDX-License-Identifier: Apache-2.0
"""Which of several failures is the first cause, and how it reads."""

from __future__ import annotations

import pytest
import torch

from tandem.errors import UserError
from tandem.runtime.failure import (
    Failed,
    Kind,
    Symptom,
    WorkerFailure,
    WorkerName,
    as_exception,
    cause_of_death,
    first_failed,
    symptom_of,
)


def failed(rank: int, kind: Kind, time_s: float) -> Failed:
    symptom = Symptom(kind, f"cause {rank}", "", time_s)
    return Failed(WorkerName("train", rank, host="a", pid=rank), "update", symptom)


@pytest.mark.parametrize(
    ("kinds", "first"),
    [
        ([Kind.LOST_PEER, Kind.DIED], 1),
        ([Kind.LOST_PEER, Kind.LOST_PEER, Kind.RAISED], 2),
        ([Kind.RAISED, Kind.DIED], 1),
        ([Kind.RAISED, Kind.RAISED], 0),
        ([Kind.LOST_PEER, Kind.LOST_PEER], 0),
    ],
)
def test_kind_counts_before_time(kinds: list[Kind], first: int) -> None:
    failures = [failed(rank, kind, float(rank)) for rank, kind in enumerate(kinds)]
    assert first_failed(failures).worker.rank == first
    assert first_failed(failures[::-1]).worker.rank == first


class DistBackendError(RuntimeError):
    """As torch's is called."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad bucket"), Kind.RAISED),
        (ValueError("connection closed by peer"), Kind.RAISED),
        (UserError("a=1: no."), Kind.RAISED),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), Kind.RAISED),
        (
            RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"),
            Kind.LOST_PEER,
        ),
        (RuntimeError("Timed out waiting 1800000ms for recv operation"), Kind.LOST_PEER),
        (DistBackendError("NCCL error in: x"), Kind.LOST_PEER),
        (ConnectionResetError(104, "reset"), Kind.LOST_PEER),
        (BrokenPipeError(32, "pipe"), Kind.LOST_PEER),
    ],
)
def test_errors_of_lost_peers_are_told_from_others(error: Exception, kind: Kind) -> None:
    assert symptom_of(error, time_s=0).kind is kind


def test_worker_failure_says_all_on_its_first_line() -> None:
    try:
        raise KeyError("layer.7")
    except KeyError as error:
        symptom = symptom_of(error, time_s=0)
    worker = WorkerName("train", 3, host="node-b", pid=77)
    failure = as_exception(Failed(worker, "update", symptom))
    assert isinstance(failure, WorkerFailure)
    first, *rest = str(failure).splitlines()
    assert first == "train rank 3 (host node-b, pid 77) failed in update: KeyError: 'layer.7'"
    assert "test_failure.py" in "\n".join(rest)
    assert (failure.pool, failure.rank, failure.method) == ("train", 3, "update")


def test_running_out_of_memory_names_what_to_lower() -> None:
    symptom = symptom_of(torch.OutOfMemoryError("Tried to allocate 2 GiB."), time_s=0)
    assert symptom.kind is Kind.RAISED
    assert symptom.cause.startswith(
        "OutOfMemoryError: Tried to allocate 2 GiB. Set actor_rollout_ref.model.enable_"
    )


def test_user_errors_stay_user_errors() -> None:
    symptom = symptom_of(UserError("a=1: is wrong. Set a=2."), time_s=0)
    raised = as_exception(Failed(WorkerName("train", 0, host="a", pid=1), "load", symptom))
    assert isinstance(raised, UserError)
    assert str(raised) == "a=1: is wrong. Set a=2."


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("Worker exit type: SYSTEM_ERROR Worker exit detail: code 2. End of file.", "killed, or"),
        (
            "The actor died because its node has died. Node Id: 9c\n\thealth check failed",
            "node was",
        ),
        ("Task was killed due to the node running low on memory.", "out of memory"),
        ("Worker exit type: INTENDED Worker exit detail: it exited.", "it exited."),
    ],
)
def test_a_death_is_told_in_one_line(text: str, cause: str) -> None:
    assert cause in cause_of_death(text)
    assert "\n" not in cause_of_death(text)


def test_a_process_that_ends_itself_says_why_in_its_last_line() -> None:
    ended = "The actor is dead. Worker exit type: SYSTEM_ERROR"
    hung = "error: vLLM: a step has not returned for 60 s"
    assert cause_of_death(ended, f"stack\n{hung}\n") == hung.removeprefix("error: ")
    assert "unexpectedly" in cause_of_death(ended, f"{hung}\nanother line")
    assert "unexpectedly" in cause_of_death(ended, "")
