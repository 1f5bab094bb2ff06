# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs that fail: acceptance tests 12 and 23. Whoever is killed or raises, the run ends
within seconds, names role and step, and leaves no process; SIGTERM saves and leaves.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.processes import (
    MARK,
    MOST_SECONDS_TO_END,
    dying,
    none_left,
    wait_for_end,
    wait_for_place,
)
from tests.fakes.commands import Command, Conditions, Ended, run_command
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

SETTINGS = (
    "trainer.device=cpu",
    "trainer.async_pipeline=True",
    "trainer.generate_ahead_steps=1",
    "data.val_files=[]",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
"""Old and reference log-probs are needed."""

HALVES = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.hybrid_engine=False")


@dataclass(frozen=True)
class Failure:
    """Rank 0 of the pool named first fails, as one of its methods is called for the ``number``-th
    time."""

    pools: tuple[str, ...]
    method: str
    number: int

    @property
    def role(self) -> str:
        """Who fails."""
        return self.pools[0]

    @property
    def split(self) -> tuple[str, ...]:
        """The keys of a device for each pool."""
        groups = ",".join(f"[{pool.replace('+', ',')}]" for pool in self.pools)
        share = f"{1 / len(self.pools):.2f}"
        return (
            f"trainer.n_gpus_per_node={len(self.pools)}",
            f"trainer.separated_node_tasks=[{groups}]",
            f"trainer.separated_node_ratios=[{','.join([share] * len(self.pools))}]",
        )


FAILURES = {
    "actor-train": Failure(("actor-train", "generate+logp+ref_logp"), "update", 3),
    "generate": Failure(("generate", "actor-train+logp+ref_logp"), "advance", 2),
    "logp": Failure(("logp", "actor-train+ref_logp", "generate"), "log_probs", 2),
    "ref_logp": Failure(("ref_logp", "actor-train+logp", "generate"), "log_probs", 2),
}


@pytest.mark.parametrize("role", FAILURES)
def test_12_whoever_is_killed_ends_the_run(material: Material, tmp_path: Path, role: str) -> None:
    failure, run = FAILURES[role], tmp_path / "run"
    command = begin(material, run, failure=failure, kind="SIGKILL")
    place = wait_for_place(command, run, role, rank=0)
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    print(ended.code, ended.stderr)


@pytest.mark.parametrize("role", FAILURES)
def test_12_whoever_raises_ends_the_run(material: Material, tmp_path: Path, role: str) -> None:
    run = tmp_path / "run"
    command = begin(material, run, failure=FAILURES[role], kind="RAISE")
    ended = command.wait()
    print(ended.code, ended.stderr)


def begin(material: Material, run: Path, *, failure: Failure, kind: str) -> Command:
    """A run in which this happens."""
    arguments = train_arguments(material, run, *SETTINGS, *failure.split)
    environment = dying(failure.role, 0, failure.method, failure.number, signal=kind)
    conditions = Conditions(environment=environment | {MARK: str(run)})
    return Command(arguments, folder=run.parent / "output", conditions=conditions)
