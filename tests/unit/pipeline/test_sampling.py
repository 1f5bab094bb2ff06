# SPDX-License-Identifier: Apache-2.0
"""Which keys decide how tokens are drawn in training and in validation, and the ids of samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.pipeline.producer import BASELINE_SAMPLE_ID_BASE, training_sampling
from tandem.pipeline.validation import validation_requests, validation_sampling
from tandem.types import VALIDATION_SAMPLE_ID_BASE, Prompt, SamplingParams

ROLLOUT = "actor_rollout_ref.rollout"
TRAINING = (f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_p=0.8", f"{ROLLOUT}.top_k=30")
VALIDATION = tuple(
    f"{ROLLOUT}.val_kwargs.{key}" for key in ("temperature=0.4", "top_p=0.5", "top_k=6")
)
LENGTH = "data.max_response_length=9"


def parts(*arguments: str) -> Any:
    """Only the configuration is read."""
    config = load_config(RunConfig, [*TRAINING, *VALIDATION, LENGTH, *arguments]).config
    return SimpleNamespace(config=config)


def test_training_draws_as_the_rollout_says() -> None:
    assert training_sampling(parts()) == SamplingParams(0.7, 0.8, 30, 9)
    greedy = training_sampling(parts(f"{ROLLOUT}.do_sample=False", f"{ROLLOUT}.ignore_eos=True"))
    assert (greedy.temperature, greedy.ignore_eos) == (0.0, True)


def test_validation_draws_where_its_temperature_is_positive_unless_do_sample_is_false() -> None:
    for do_sample in ("null", "True"):
        sampled = validation_sampling(parts(f"{ROLLOUT}.val_kwargs.do_sample={do_sample}"))
        assert sampled == SamplingParams(0.4, 0.5, 6, 9)
    for greedy in ("do_sample=False", "temperature=0"):
        assert validation_sampling(parts(f"{ROLLOUT}.val_kwargs.{greedy}")).temperature == 0.0


def test_ids_of_training_baselines_and_validation_never_meet() -> None:
    sampling = SamplingParams(0.0, 1.0, -1, 9)
    prompts = [Prompt(row, row, (1,), "", "source", "") for row in (0, 5)]
    ids = [r.sample_ids for r in validation_requests(prompts, 2, sampling=sampling)]
    base = VALIDATION_SAMPLE_ID_BASE
    assert ids == [(base, base + 1), (base + 10, base + 11)]
    many_draws = 1 << 40
    assert many_draws < BASELINE_SAMPLE_ID_BASE < BASELINE_SAMPLE_ID_BASE + many_draws < base
