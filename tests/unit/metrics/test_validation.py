# SPDX-License-Identifier: Apache-2.0
"""Validation metrics: verl's names, and its numbers through a plain re-statement of its loops."""

import random
from collections import Counter

import numpy as np
import pytest

from tandem.metrics.validation import ValidationSample, validation_metrics


def _bootstrap(values, size, reduce):
    """verl's bootstrap, one draw at a time."""
    state = np.random.RandomState(42)
    draws = state.choice(len(values), size=(1000, size), replace=True)
    results = [reduce([values[index] for index in draw]) for draw in draws]
    return float(np.mean(results)), float(np.std(results))


def _majority(pairs):
    votes = Counter(prediction for _, prediction in pairs)  # keeps the order of first appearance
    winner = max(votes, key=lambda prediction: votes[prediction])
    return next(value for value, prediction in pairs if prediction == winner)


def test_one_sample_a_prompt_is_a_plain_mean():
    samples = [ValidationSample("gsm8k", row=row, score=float(row < 3)) for row in range(4)]

    assert validation_metrics(samples) == {"val-core/gsm8k/reward/mean@1": 0.75}


def test_sources_are_kept_apart_and_accuracy_is_the_core_variable():
    samples = [
        ValidationSample("a", row=0, score=0.2, extra={"acc": 1.0}),
        ValidationSample("a", row=1, score=0.4, extra={"acc": 0.0}),
        ValidationSample("b", row=0, score=1.0),
    ]

    assert validation_metrics(samples) == pytest.approx(
        {
            "val-aux/a/reward/mean@1": 0.3,
            "val-core/a/acc/mean@1": 0.5,
            "val-core/b/reward/mean@1": 1.0,
        }
    )


def test_names_for_several_samples():
    samples = [
        ValidationSample("a", row=0, score=float(k % 2), prediction=str(k % 3)) for k in range(6)
    ]

    names = set(validation_metrics(samples))

    core = {"mean@6", "best@6/mean", "best@6/std", "maj@6/mean", "maj@6/std"}
    aux = {"std@6", "worst@6/mean", "worst@6/std"}
    aux |= {
        f"{kind}@{n}/{stat}"
        for kind in ("best", "worst", "maj")
        for n in (2, 4)
        for stat in ("mean", "std")
    }
    expected = {f"val-core/a/reward/{name}" for name in core}
    assert names == expected | {f"val-aux/a/reward/{name}" for name in aux}


def test_numbers_equal_one_draw_at_a_time():
    rng = random.Random(0)
    scores = {row: [rng.choice([0.0, 0.25, 1.0]) for _ in range(5)] for row in range(3)}
    votes = {row: [rng.choice("xyz") for _ in range(5)] for row in range(3)}
    samples = [
        ValidationSample("a", row=row, score=score, prediction=vote)
        for row in scores
        for score, vote in zip(scores[row], votes[row], strict=True)
    ]

    metrics = validation_metrics(samples)

    for size, section in ((2, "val-aux"), (5, "val-core")):
        best = [_bootstrap(scores[row], size, max) for row in scores]
        majority = [
            _bootstrap(list(zip(scores[row], votes[row], strict=True)), size, _majority)
            for row in scores
        ]
        for kind, expected in (("best", best), ("maj", majority)):
            name = f"{section}/a/reward/{kind}@{size}"
            assert metrics[f"{name}/mean"] == pytest.approx(np.mean([m for m, _ in expected]))
            assert metrics[f"{name}/std"] == pytest.approx(np.mean([s for _, s in expected]))


def test_failed_rewards_are_left_out_and_counted():
    samples = [
        ValidationSample("a", row=0, score=1.0),
        ValidationSample("a", row=0, score=None),
        ValidationSample("a", row=1, score=None),
        ValidationSample("a", row=1, score=None),
    ]

    metrics = validation_metrics(samples)

    assert metrics["val-core/a/reward/mean@2"] == 1.0
    assert metrics["val-aux/a/failures/count"] == 3.0


def test_no_majority_without_predictions():
    samples = [
        ValidationSample("a", row=0, score=1.0, prediction="x"),
        ValidationSample("a", row=0, score=0.0),
    ]

    assert not any("maj@" in name for name in validation_metrics(samples))


def test_nothing_to_validate():
    assert validation_metrics([]) == {}


def test_the_score_is_reported_though_a_part_of_it_has_the_name_reward() -> None:
    samples = [ValidationSample("a", row=0, score=0.2, extra={"reward": 1.0})]
    assert validation_metrics(samples)["val-core/a/reward/mean@1"] == 0.2
