# SPDX-License-Identifier: Apache-2.0
"""Small simulated runs, and functions that read their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.config.schema.run import RunConfig
from tandem.planner.engines import SimulatedTimes
from tandem.planner.simulation import SimulatedRun, SimulatedSetup, simulated_config

APART = (("generate",), ("logp", "actor-train"), ("ref_logp",))
BATCH, SAMPLES = 4, 2


def config(lag: int, *further: str, num_steps: int = 24) -> RunConfig:
    """Configure batches of four prompts with two samples each, one optimizer step a batch."""
    return simulated_config(
        num_prompts=BATCH, num_samples=SAMPLES, lag=lag, num_steps=num_steps, further=further
    )


def times(
    *,
    generate: float | Callable[[int, int], float],
    slots: int = BATCH * SAMPLES,
    decode_step_s: float = 0.001,
    **tasks: float,
) -> SimulatedTimes:
    """Return constant seconds by task (dashes are underscores, 0 if not named)."""
    seconds = {name.replace("_", "-"): value for name, value in tasks.items()}
    seconds["ref_logp"] = tasks.get("ref_logp", 0.0)
    return SimulatedTimes(
        response_s=generate if callable(generate) else lambda uid, k: generate,
        task_s=lambda task, number: seconds.get(task, 0.0),
        num_slots=slots,
        decode_step_s=decode_step_s,
        num_tokens=lambda _: 4,
    )


def small_setup(num_steps: int = 24, groups: Sequence[Sequence[str]] = APART) -> SimulatedSetup:
    """Return a setup with just enough data, and with all tasks but logp on their own devices."""
    return SimulatedSetup(groups, num_rows=num_steps * BATCH)


def lags(run: SimulatedRun) -> list[int]:
    """Return the lags of all samples trained on, each by its oldest token."""
    return [
        step - 1 - completion.weights_version
        for step, completions in run.samples.items()
        for completion in completions
    ]


def num_versions(run: SimulatedRun) -> int:
    """Return the most versions that drew tokens of one sequence."""
    return max(len(c.version_runs) for samples in run.samples.values() for c in samples)


def spans(run: SimulatedRun, track: str, name: str) -> list[tuple[float, float]]:
    """Return the begins and ends of all spans with a name on a track."""
    return [(e.begin_s, e.end_s) for e in run.events if (e.track, e.name) == (track, name)]


def updates(run: SimulatedRun) -> dict[int, tuple[float, float]]:
    """Return the begin and the end of the optimizer phase by step."""
    return {
        int(e.details["step"]): (e.begin_s, e.end_s)
        for e in run.events
        if (e.track, e.name) == ("actor-train", "update")
    }


def trained(run: SimulatedRun) -> list[int]:
    """Return the steps of all training records."""
    return [row.step for _, row in run.rows if "training/epoch" in row.metrics]


def validated(run: SimulatedRun) -> list[int]:
    """Return the steps of all validation records."""
    return [row.step for _, row in run.rows if any(n.startswith("val-") for n in row.metrics)]
