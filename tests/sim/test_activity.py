# SPDX-License-Identifier: Apache-2.0
"""The phase that the bar of a terminal shows, under the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tandem.metrics.activity import Activity, Phase
from tandem.planner.simulation import simulate
from tests.sim.schedules import APART, config, small_setup, times

EVERY_S = 0.25
TOGETHER = (("generate", "logp", "actor-train", "ref_logp"),)


class Watched(Activity):
    """An activity that is looked at from time to time, as a bar does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[float, str] = {}
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def during(self, phase: Phase, **parts: Any) -> Iterator[None]:
        """Begin to look with the first phase of the run."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())
        with super().during(phase, **parts):
            yield

    async def _watch(self) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(EVERY_S / 2)  # never at the moment at which a phase ends
        while True:
            self.seen[clock()] = self.describe()
            await asyncio.sleep(EVERY_S)


def changes(activity: Watched) -> list[str]:
    """Return what was shown, without repetitions."""
    shown = [text for _, text in sorted(activity.seen.items())]
    return [text for text, before in zip(shown, [None, *shown], strict=False) if text != before]


def test_a_synchronous_step_shows_each_of_its_phases() -> None:
    activity = Watched()
    keys = ("data.val_files=[some]", "trainer.test_freq=1", "trainer.val_before_train=False")
    simulate(
        config(0, *keys, "actor_rollout_ref.actor.ppo_mini_batch_size=2", num_steps=1),
        replace(
            times(generate=lambda uid, k: 1.0 + uid, reward=2.0, actor_train=1.0, slots=8),
            validation_s=2.0,
        ),
        setup=replace(small_setup(1, TOGETHER), num_validation_rows=3, activity=activity),
    )
    assert changes(activity) == [
        "generating 0/8",
        "generating 2/8",
        "generating 4/8",
        "generating 6/8",
        "rewards 4/8",
        "rewards 6/8",
        "update 0/2",
        "update 1/2",
        "validating 0/3",
    ]


def test_dynamic_sampling_shows_the_samples_that_are_drawn_in_place_of_others() -> None:
    activity = Watched()
    rows = iter([0.0] * 4 + [0.0, 1.0] * 100)
    keys = ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score")
    simulate(
        config(0, *keys, num_steps=1),
        times(generate=1.0, reward=1.0, actor_train=1.0),
        setup=replace(small_setup(4, TOGETHER), score=lambda row, k: next(rows), activity=activity),
    )
    assert changes(activity) == [
        "generating 0/8",
        "rewards 0/8",
        "generating 0/4",
        "rewards 0/4",
        "update",
    ]


def test_an_asynchronous_step_shows_its_update_and_the_batch_that_it_waits_for() -> None:
    """Generation never stops, so the number of its samples says nothing about the step."""
    activity = Watched()
    simulate(
        config(1, num_steps=4),
        times(generate=lambda uid, k: 1.0 + uid % 4, slots=4, actor_train=1.0),
        setup=replace(small_setup(4, APART), activity=activity),
    )
    shown = changes(activity)
    assert set(shown) <= {
        "update",
        "switching weights",
        *(f"collecting {i}/8" for i in (0, 2, 4, 6)),
    }
    assert {"update", "collecting 0/8", "collecting 4/8"} <= set(shown)
