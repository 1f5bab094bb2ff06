# SPDX-License-Identifier: Apache-2.0
"""The planner against exhaustive search, both on the simulated pipeline."""

from __future__ import annotations

import itertools
import statistics
from functools import cache

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.planner.prediction import predictor
from tandem.planner.search import Split, suggest
from tandem.planner.task_times import TaskTimes

GROUPS = (("actor-train", "logp"), ("ref_logp",), ("generate",))
LAGS = (0, 1, 2)
TAIL = (0.4, 0.4, 0.4, 0.4, 0.4, 0.4, 0.8, 0.8, 0.8, 1.2, 1.5, 4.5)
CONFIG = load_config(
    RunConfig, ["actor_rollout_ref.actor.use_kl_loss=True", "data.val_files=[]"]
).config


def times(generate: float, train: float, ref: float, *, has_tail: bool = False) -> TaskTimes:
    """Seconds on 4 devices, all of which divide but for the sync."""
    mean = statistics.fmean(TAIL)
    measured = {
        "generate": ((4, generate),),
        "actor-train": ((4, train),),
        "logp": ((4, train / 4),),
        "ref_logp": ((4, ref),),
        "sync": ((1, 0.3),),
    }
    return TaskTimes(measured, tuple(x / mean for x in TAIL) if has_tail else (1.0,))


CASES = {
    "balanced": times(8, 6, 2),
    "long tail": times(5, 6, 2, has_tail=True),
    "training takes longest": times(3, 16, 2),
}


def divisions(num_devices: int, num_groups: int) -> list[tuple[int, ...]]:
    counts = range(1, num_devices)
    return [d for d in itertools.product(counts, repeat=num_groups) if sum(d) == num_devices]


@pytest.mark.parametrize("name", CASES)
def test_6_3_8_from_a_bad_start_within_10_percent_of_the_best_split(name: str) -> None:
    """dotsrl.md 6.3 item 8: the best by exhaustive search on the simulator."""
    predict = cache(predictor(CONFIG, CASES[name], groups=GROUPS))
    best = min(predict(Split(d, lag)) for d in divisions(5, 3) for lag in LAGS)
    for start in ((3, 1, 1), (1, 1, 3)):
        found = suggest(
            CASES[name],
            GROUPS,
            start=Split(start, 0),
            lags=LAGS,
            is_allowed=lambda _: True,
            predict=predict,
        )
        assert found.seconds <= 1.1 * best
        assert found.seconds < found.predictions[Split(start, 0)]
        assert len(found.predictions) < len(divisions(5, 3)) * len(LAGS)
