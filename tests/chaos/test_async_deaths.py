# SPDX-License-Identifier: Apache-2.0
"""Asynchronous runs that fail: acceptance tests 12 and 23. Whoever is killed or raises, the run
ends within seconds, names role and step, and leaves no process; SIGTERM saves and leaves.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "trainer.save_freq=1",
    "data.val_files=[]",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
"""Old and reference log-probs are needed."""

ENDLESS = ("trainer.total_training_steps=1000", "trainer.total_epochs=1000")
RATIOS = {2: "[0.5,0.5]", 3: "[0.34,0.33,0.33]"}


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
        return (
            f"trainer.n_gpus_per_node={len(self.pools)}",
            f"trainer.separated_node_tasks=[{groups}]",
            f"trainer.separated_node_ratios={RATIOS[len(self.pools)]}",
        )


FAILURES = {
    "actor-train": Failure(("actor-train", "generate+logp+ref_logp"), "update", 3),
    "generate": Failure(("generate", "actor-train+logp+ref_logp"), "advance", 2),
    "logp": Failure(("logp", "actor-train+ref_logp", "generate"), "score", 2),
    "ref_logp": Failure(("ref_logp", "actor-train+logp", "generate"), "score", 2),
}
VARIANTS = (
    "actor-train",
    *(pytest.param(role, marks=pytest.mark.deep) for role in ("generate", "logp", "ref_logp")),
)


@pytest.mark.parametrize("role", VARIANTS)
def test_12_the_death_of_any_process_ends_the_run(
    material: Material, tmp_path: Path, role: str
) -> None:
    failure, run = FAILURES[role], tmp_path / "run"
    command = begin(material, run, failure=failure, kind="SIGKILL")
    place = wait_for_place(command, run, role, rank=0)
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    # The reply to the call before may be lost with the process: then it is the one named.
    check_end(ended, place, role=role, says=rf"died in (add|swap|transfer|{failure.method}): ")
    assert none_left(str(run))


@pytest.mark.parametrize("role", VARIANTS)
def test_12_an_error_in_any_process_ends_the_run(
    material: Material, tmp_path: Path, role: str
) -> None:
    failure, run = FAILURES[role], tmp_path / "run"
    command = begin(material, run, failure=failure, kind="RAISE")
    place = wait_for_place(command, run, role, rank=0)
    ended = command.wait()
    says = rf"failed in {failure.method}: RuntimeError: as a test wants, at (?P<when>[0-9.]+)$"
    found = check_end(ended, place, role=role, says=says)
    assert time.time() - float(found["when"]) < MOST_SECONDS_TO_END
    assert none_left(str(run))


def begin(material: Material, run: Path, *, failure: Failure, kind: str) -> Command:
    """A run in which this happens."""
    arguments = train_arguments(material, run, *SETTINGS, *failure.split)
    environment = dying(failure.role, 0, failure.method, failure.number, signal=kind)
    conditions = Conditions(environment=environment | {MARK: str(run)})
    return Command(arguments, folder=run.parent / "output", conditions=conditions)


def check_end(ended: Ended, place: dict[str, Any], *, role: str, says: str) -> re.Match[str]:
    """It failed, and one line says in which step, who, and what happened to him."""
    assert ended.code == 1
    (line,) = ended.errors
    who = re.escape(f"{role} rank 0 (host {place['host']}, pid {place['pid']})")
    found = re.match(f"error: step [1-4]: {who} {says}", line)
    assert found, line
    return found


@pytest.mark.deep
def test_12_and_23_who_dies_in_a_save_leaves_the_checkpoint_before_and_sigterm_a_new_one(
    material: Material, tmp_path: Path
) -> None:
    """The second save is never finished; the run goes on after the first, and is stopped."""
    run, failure = tmp_path / "run", Failure(("actor-train+logp+ref_logp", "generate"), "save", 2)
    ended = begin(material, run, failure=failure, kind="SIGKILL").wait()
    assert ended.code == 1
    assert ended.errors[0].startswith(f"error: step 2: {failure.role} rank 0 "), ended.errors
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "1"
    arguments = train_arguments(
        material, run, *SETTINGS, *failure.split, "trainer.save_freq=1000", *ENDLESS
    )
    conditions = Conditions(environment={MARK: str(run)})
    command = Command(arguments, folder=tmp_path / "resumed", conditions=conditions)
    command.wait_for(run / "metrics.jsonl", text='"step": 3')
    command.signal(signal.SIGTERM)
    stopped_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - stopped_s < MOST_SECONDS_TO_END
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    assert none_left(str(run))
    last = max(metrics_of(run))
    assert list(metrics_of(run)) == list(range(1, last + 1)) and last >= 3
    assert (run / "latest_checkpointed_iteration.txt").read_text() == str(last)


def test_12_rewards_that_raise_end_the_run(material: Material, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ("custom_reward_function.name=broken", *FAILURES["actor-train"].split, *ENDLESS)
    ended = run_command(
        train_arguments(material, run, *SETTINGS, *keys),
        folder=tmp_path / "output",
        conditions=Conditions(environment={MARK: str(run)}),
    )
    assert ended.code == 2
    (line,) = ended.errors
    assert "custom_reward_function.path=" in line and "out of order" in line
    assert none_left(str(run))
