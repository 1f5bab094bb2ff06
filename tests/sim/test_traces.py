# SPDX-License-Identifier: Apache-2.0
"""Random schedules of every mode take place exactly as recorded, event for event.

The record holds one digest a schedule. A change of the pipeline that is to leave every schedule as
it is keeps the digests. Another change writes them anew, and says why::

    python -m tests.sim.test_traces
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import SimulatedRun, simulate
from tests.sim.schedules import APART, BATCH, SAMPLES, config, small_setup

RECORD = Path(__file__).parent / "traces.json"
SHARED = (("generate", "logp", "actor-train", "ref_logp"),)
MODES = {
    "synchronous": (),
    "one step off": ("trainer.deterministic_async=True",),
    "partial": (),
    "whole": ("actor_rollout_ref.rollout.partial_rollout=False",),
    "in turns": (),
    "scorer apart": (),
}
GROUPS = {"in turns": SHARED, "scorer apart": (("generate",), ("logp",), ("actor-train",))}
DROPS = (
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=score",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "trainer.total_epochs=1",
)
NUM_SEEDS = 10


def schedule_keys(rng: random.Random, mode: str, *, validates: bool, drops: bool) -> list[str]:
    """Configuration keys of a random schedule."""
    keys = [*MODES[mode], f"trainer.save_freq={max(rng.randint(-1, 3), 0)}"]
    if rng.random() < 0.5:
        keys.append("actor_rollout_ref.actor.ppo_mini_batch_size=2")
    if validates:
        keys += ["data.val_files=[some]", "data.train_files=[some]"]
        keys.append(f"trainer.test_freq={rng.choice([0, 1, 2, 3, 100])}")
        keys.append(f"trainer.val_before_train={rng.random() < 0.5}")
    return [*keys, *(DROPS if drops else ())]


def schedule_times(rng: random.Random) -> SimulatedTimes:
    """Durations of random magnitude; one response in ten is ten times as long."""
    tasks = ("actor-train", "sync", "reward", "logp", "ref_logp")
    scale = {task: 10 ** rng.uniform(-1, 1) * (rng.random() < 0.8) for task in tasks}
    return SimulatedTimes(
        response_s=lambda uid, k: (10.0 if rng.random() < 0.1 else 1.0) * rng.uniform(0.1, 4),
        task_s=lambda task, number: scale.get(task, 0.0) * rng.uniform(0, 1),
        num_slots=rng.randint(2, 4 * BATCH * SAMPLES),
        decode_step_s=0.02,
        num_tokens=lambda seconds: 1 + int(seconds * 3),
        validation_s=rng.uniform(0.1, 12),
    )


def every_fourth_alike(row: int, k: int) -> float:
    """Rewards of a group that is dropped, and of three that are not."""
    return 1.0 if row % 4 == 3 else float(k)


def trace(run: SimulatedRun) -> list[Any]:
    """Everything that a schedule decides."""
    events = [asdict(event) for event in run.events]
    for event in events:
        event["begin_s"], event["end_s"] = round(event["begin_s"], 6), round(event["end_s"], 6)
        event["details"] = {n: round(v, 6) for n, v in event["details"].items()}
    samples = {
        step: [(c.sample_id, c.version_runs) for c in completions]
        for step, completions in run.samples.items()
    }
    names = sorted({(row.step, name) for _, row in run.rows for name in row.metrics})
    return [run.summary.last_step, run.summary.stopped_early, events, samples, names]


def digest(mode: str, seed: int) -> str:
    """Digest of a random schedule, and of the run that goes on from its last checkpoint."""
    rng = random.Random(f"{mode} {seed}")
    lag = 0 if mode == "synchronous" else rng.randint(1, 4)
    num_steps, validates, drops = rng.randint(3, 6), rng.random() < 0.6, rng.random() < 0.3
    keys = schedule_keys(rng, mode, validates=validates, drops=drops)
    settings = replace(
        small_setup(num_steps, GROUPS.get(mode, APART)),
        num_rows=BATCH * rng.choice([num_steps, num_steps - 1, num_steps + 2]),
        num_validation_rows=rng.randint(1, 4) if validates else 0,
        num_engines=rng.choice([1, 1, 2, 3]),
        num_engine_rows=rng.choice([None, 4, 40]),
        stages_weights=rng.random() < 0.5,
        is_validated=rng.random() < 0.5,
        **({"score": every_fourth_alike} if drops else {}),
    )
    stop_s = rng.uniform(0, 40) if rng.random() < 0.3 else None
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Path(folder))
        settings = replace(settings, store=store)
        small = config(lag, *keys, num_steps=num_steps)
        found = [
            trace(simulate(small, schedule_times(rng), setup=replace(settings, stop_s=stop_s)))
        ]
        checkpoint = store.latest()
        if checkpoint is not None:
            resumed = replace(settings, checkpoint=checkpoint)
            found.append(trace(simulate(small, schedule_times(rng), setup=resumed)))
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


@pytest.mark.parametrize("mode", MODES)
def test_every_schedule_takes_place_as_recorded(mode: str) -> None:
    recorded = json.loads(RECORD.read_text())[mode]
    assert [digest(mode, seed) for seed in range(NUM_SEEDS)] == recorded


if __name__ == "__main__":
    digests = {mode: [digest(mode, seed) for seed in range(NUM_SEEDS)] for mode in MODES}
    RECORD.write_text(json.dumps(digests, indent=1) + "\n")
