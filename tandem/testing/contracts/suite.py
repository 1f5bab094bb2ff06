# SPDX-License-Identifier: Apache-2.0
"""The run of all checks on a platform: the same ones on a vendor's hardware and on its double."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch
from torch import distributed

from tandem.platforms.record import Platform
from tandem.testing.contracts import device, model, world
from tandem.testing.contracts.check import Bench, Check
from tandem.testing.doubles import is_double
from tandem.testing.processes import Here, Launch, run_processes

CHECKS: tuple[Check, ...] = (*device.CHECKS, *world.CHECKS, *model.CHECKS)
MAX_RANKS = 2
_REQUIRING = frozenset({"require", "require_equal", "bounded", "error_of"})
"""The functions that raise ContractError; a failure's place is the line that called one of them."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one check on all ranks.

    Attributes:
        failure: "" if it passed, else the error with its rank.
        measured: rank 0's measurements.
        was_run: False if there was nothing to check.
    """

    name: str
    failure: str
    seconds: float
    measured: Mapping[str, float]
    was_run: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    """The device that the suite ran on, as rank 0 sees it."""

    device_name: str
    num_devices: int
    is_double: bool
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """The result of a run of the suite."""

    found: Found
    num_ranks: int
    outcomes: tuple[Outcome, ...]

    @property
    def failures(self) -> tuple[str, ...]:
        """A line ``name: reason`` for each check that failed."""
        return tuple(f"{one.name}: {one.failure}" for one in self.outcomes if one.failure)


def run_suite(platform: Platform, *, num_ranks: int, timeout_s: float = 300) -> SuiteReport:
    """Run every check on ``num_ranks`` processes of ``platform``, which get its devices in turn.

    A check that fails on one rank may leave the world out of step; later ones then fail too.

    Raises:
        ProcessError: a process died, or the suite did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(
            _run_all,
            [platform] * num_ranks,
            args=(Path(folder),),
            launch=Launch(timeout_s=timeout_s),
        )
    found, _ = results[0]
    by_rank: list[Sequence[Outcome]] = [outcomes for _, outcomes in results]
    return SuiteReport(
        found, num_ranks, tuple(_together(row) for row in zip(*by_rank, strict=True))
    )


def _together(outcomes: Sequence[Outcome]) -> Outcome:
    first = outcomes[0]
    failed = (f"rank {i}: {one.failure}" for i, one in enumerate(outcomes) if one.failure)
    failure = next(failed, "")
    return replace(first, failure=failure, was_run=first.was_run or bool(failure))


def _run_all(here: Here, folder: Path) -> tuple[Found, list[Outcome]]:
    bench = Bench(here, folder)
    outcomes = []
    for check in CHECKS:
        outcomes.append(_run_one(check, bench))
        distributed.barrier()
    return _found(here), outcomes


def _run_one(check: Check, bench: Bench) -> Outcome:
    torch.manual_seed(0)
    start = time.perf_counter()
    failure, measured = "", None
    try:
        measured = check.run(bench)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = next(f for f in reversed(frames) if f.name not in _REQUIRING)
        failure = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    seconds = time.perf_counter() - start
    was_run = measured is not None or bool(failure)
    return Outcome(check.name, failure, seconds, dict(measured or {}), was_run=was_run)


def _found(here: Here) -> Found:
    platform = here.platform
    versions = {"torch": str(torch.__version__), **platform.versions()}
    toolkit = torch.version.cuda or torch.version.hip
    if toolkit is not None:
        versions["toolkit"] = toolkit
    if here.platform.extension and not is_double():
        versions[here.platform.extension] = metadata.version(here.platform.extension)
    return Found(
        device_name=platform.device_name(),
        num_devices=platform.num_devices(),
        is_double=is_double(),
        versions=versions,
    )
