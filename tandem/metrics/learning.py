# SPDX-License-Identifier: Apache-2.0
"""The watch over steps that teach the policy nothing, and the probable causes in words.

The report reads the same causes from the metrics of a finished run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.config.schema.run import RunConfig

logger = logging.getLogger(__name__)

NUM_STEPS_TO_WARN = 3
"""The number of steps in a row without an advantage that is worth a warning."""
_SCORES = ("critic/score/min", "critic/score/max")
_ADVANTAGES = ("critic/advantages/min", "critic/advantages/max")
METRICS_READ = (*_SCORES, *_ADVANTAGES, "response_length/clip_ratio")
"""The metrics from which the causes are derived."""
_ROUNDING = 1e-2
"""The bound of advantages that are rounding errors: whitening enlarges those of equal rewards."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings of generation that can prevent learning."""

    is_greedy: bool
    num_samples: int
    max_response_length: int

    @classmethod
    def of(cls, config: RunConfig) -> Sampling:
        """Return the settings of a run."""
        rollout = config.actor_rollout_ref.rollout
        is_greedy = not rollout.do_sample or rollout.temperature == 0
        return cls(is_greedy, rollout.n, config.data.max_response_length)


class LearningWatch:
    """A watch that logs one warning when ``NUM_STEPS_TO_WARN`` steps in a row teach nothing."""

    def __init__(self, config: RunConfig) -> None:
        self._sampling = Sampling.of(config)
        self._num_steps = 0

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step by its metrics, and log the warning if it is due."""
        self._num_steps = 0 if teaches(metrics) else self._num_steps + 1
        if self._num_steps == NUM_STEPS_TO_WARN:
            logger.warning(
                "step %d: in %d steps in a row no response had an advantage, so nothing was "
                "learnt from the reward: %s",
                step,
                self._num_steps,
                probable_causes(metrics, self._sampling),
            )


def teaches(metrics: Mapping[str, float]) -> bool:
    """Return whether a response of the step has an advantage other than 0."""
    if not all(name in metrics for name in _ADVANTAGES):
        return True  # supervised, or only validated
    largest = max(abs(metrics[name]) for name in _ADVANTAGES)
    lowest, highest = (metrics.get(name) for name in _SCORES)
    return largest > (_ROUNDING if lowest == highest else 0)


def probable_causes(metrics: Mapping[str, float], sampling: Sampling) -> str:
    """Return the probable causes of a step without advantages, in words.

    Args:
        metrics: the metrics of such a step.
    """
    if sampling.is_greedy and sampling.num_samples > 1:
        return (
            f"the {sampling.num_samples} responses to a prompt are equal, because sampling is "
            "greedy; set actor_rollout_ref.rollout.do_sample=True and a temperature above 0"
        )
    lowest, highest = (metrics.get(name) for name in _SCORES)
    if lowest is None or highest is None:
        return "no reward has a value"
    if lowest != highest:
        return (
            f"the responses to each prompt all score alike (from {lowest:g} to {highest:g} over "
            "the batch); take prompts that are neither too easy nor too hard, or raise "
            "actor_rollout_ref.rollout.n"
        )
    if lowest > 0:
        return (
            f"every response scores {lowest:g}; the prompts are too easy, or the reward does not "
            "depend on the response"
        )
    clipped = metrics.get("response_length/clip_ratio", 0.0)
    return (
        f"every response scores {lowest:g}; look at the prompt, at the answer format that the "
        f"reward expects, and at the length limit ({100 * clipped:.0f} % of the responses have "
        f"data.max_response_length={sampling.max_response_length} tokens)"
    )
