# SPDX-License-Identifier: Apache-2.0
"""The warning of steps that teach nothing, and the causes that it names."""

from __future__ import annotations

import re

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.metrics.learning import LearningWatch, Sampling, probable_causes, teaches

SAMPLING = Sampling(is_greedy=False, num_samples=4, max_response_length=64)


def metrics(low: float, high: float, advantage: float = 0.0) -> dict[str, float]:
    return {
        "critic/score/min": low,
        "critic/score/max": high,
        "critic/advantages/min": -advantage,
        "critic/advantages/max": advantage,
        "response_length/clip_ratio": 0.75,
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (metrics(0, 1, 1.5), True),
        (metrics(0, 1), False),
        (metrics(1, 1, 6e-4), False),
        (metrics(0, 1e-3, 1e-3), True),
        ({"train/loss": 2.0}, True),
    ],
    ids=["differ", "alike within groups", "rounding errors", "small", "supervised"],
)
def test_only_an_advantage_teaches(row: dict[str, float], expected: bool) -> None:
    assert teaches(row) is expected


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (metrics(0, 0), "every response scores 0; look at the prompt, .*75 % .*_length=64 tokens"),
        (metrics(1, 1), "every response scores 1; the prompts are too easy"),
        (metrics(0, 1), r"all score alike \(from 0 to 1 over the batch\)"),
        ({}, "no reward has a value"),
    ],
    ids=["wrong", "right", "alike", "failed"],
)
def test_the_cause_depends_on_the_scores(row: dict[str, float], words: str) -> None:
    assert re.search(words, probable_causes(row, SAMPLING))


def test_the_third_step_in_a_row_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = LearningWatch(load_config(RunConfig, []).config)
    rows = [metrics(0, 0)] * 2 + [metrics(0, 1, 1.0)] + [metrics(0, 0)] * 5
    for step, row in enumerate(rows, 1):
        watch.observe(step, row)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "step 6: in 3 steps in a row no response had an advantage"
    )


def test_greedy_sampling_is_blamed_first(caplog: pytest.LogCaptureFixture) -> None:
    keys = ["actor_rollout_ref.rollout.do_sample=False", "actor_rollout_ref.rollout.n=4"]
    watch = LearningWatch(load_config(RunConfig, keys).config)
    for step in (1, 2, 3):
        watch.observe(step, metrics(0, 1))
    assert "the 4 responses to a prompt are equal, because sampling is greedy" in caplog.text
