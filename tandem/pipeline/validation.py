# SPDX-License-Identifier: Apache-2.0
"""Validation: the whole validation set through the same rollout, scored and averaged by data
source.

Its weights stay in use until all of it is generated; training goes on meanwhile. Sample ids of
validation have a range of their own, the same at every validation: sampled validations of two steps
draw the same random numbers and differ by the weights alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.metrics.records import dump_samples
from tandem.metrics.validation import validation_metrics, validation_samples
from tandem.pipeline.context import RunContext
from tandem.pipeline.failures import require_fresh, warn_of_failed_rewards
from tandem.pipeline.producer import Answers, score_samples
from tandem.pipeline.rollout_loop import RolloutLoop
from tandem.pipeline.weights import WeightFlow
from tandem.types import (
    VALIDATION_SAMPLE_ID_BASE,
    GenerationRequest,
    Group,
    Prompt,
    SamplingParams,
)

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]

VALIDATION_SECONDS = "timing_s/testing"
"""In the row of every step that was validated, whatever came of it."""


class Validator:
    """Validates on request, one step at a time.

    Attributes:
        metrics: of the validation finished last, {} if there was none.
        step: the step whose validation was begun last, -1 before.
    """

    def __init__(self, parts: RunContext, rollout: RolloutLoop, *, flow: WeightFlow) -> None:
        self._parts = parts
        self._rollout = rollout
        self._flow = flow
        self.metrics: Metrics = {}
        self.step = -1
        self._under_way: list[asyncio.Future[Any]] = []

    def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[Metrics]:
        """Validate the version in use, which stays so until all is generated. The task yields the
        metrics of its row, {} if it is dropped.
        """
        self.step = self._flow.in_use
        self._flow.pin()
        parts = self._parts
        num_samples = parts.config.actor_rollout_ref.rollout.val_kwargs.n
        prompts, sampling = parts.validation_prompts, validation_sampling(parts)
        answers = self._rollout.submit(validation_requests(prompts, num_samples, sampling=sampling))
        scoring = [
            tasks.create_task(_score(parts, prompt, future=future))
            for prompt, future in zip(prompts, answers, strict=True)
        ]
        self._under_way = [one for one in self._under_way if not one.done()] + answers + scoring
        return tasks.create_task(self._validate(self.step, answers, scoring=scoring))

    def drop(self) -> None:
        """Validations under way come to nothing, at once."""
        for one in self._under_way:
            one.cancel()

    async def _validate(
        self, step: int, answers: Sequence[Answers], *, scoring: Sequence[asyncio.Task[Group]]
    ) -> Metrics:
        """``val_kwargs.n`` samples of every validation prompt, in row order."""
        begin_s = self._parts.clock()
        with self._parts.trace.span("validation", "validation", details={"step": step}):
            await asyncio.gather(*answers, return_exceptions=True)
            await self._flow.unpin()
            await asyncio.gather(*scoring, return_exceptions=True)
        if any(task.cancelled() for task in scoring):
            logger.info("the validation of step %d was dropped", step)
            return {}
        groups = tuple(task.result() for task in scoring)
        require_fresh(groups, version=step, max_lag=0)
        warn_of_failed_rewards(groups, f"validation of step {step}")
        self._dump(step, groups)
        self.metrics = summarize(groups)
        seconds = self._parts.clock() - begin_s
        return {"training/global_step": float(step), VALIDATION_SECONDS: seconds, **self.metrics}

    def _dump(self, step: int, groups: Sequence[Group]) -> None:
        trainer = self._parts.config.trainer
        for group in groups[: trainer.log_val_generations]:
            sample = group.samples[0]
            logger.info(
                "validation %r -> %r: %g", group.prompt.text, sample.text, sample.reward.score
            )
        if trainer.validation_data_dir is None:
            return
        try:
            dump_samples(trainer.validation_data_folder, step, groups=groups)
        except OSError as error:
            logger.warning("validation of step %d is not dumped: %s", step, error)


def summarize(groups: Sequence[Group]) -> dict[str, float]:
    """verl's ``val-core`` and ``val-aux`` metrics of validated groups."""
    return validation_metrics(validation_samples(groups))


def validation_sampling(parts: RunContext) -> SamplingParams:
    """The sampling parameters of ``rollout.val_kwargs``; greedy unless ``do_sample``."""
    rollout = parts.config.actor_rollout_ref.rollout
    kwargs = rollout.val_kwargs
    return SamplingParams(
        temperature=kwargs.temperature if kwargs.do_sample else 0.0,
        top_p=kwargs.top_p,
        top_k=kwargs.top_k,
        max_new_tokens=parts.config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )


def validation_requests(
    prompts: Sequence[Prompt], num_samples: int, *, sampling: SamplingParams
) -> list[GenerationRequest]:
    """One request a prompt, with ids that depend on the prompt's row only."""
    return [
        GenerationRequest(
            sample_ids=tuple(
                VALIDATION_SAMPLE_ID_BASE + prompt.row * num_samples + k for k in range(num_samples)
            ),
            prompt_ids=prompt.token_ids,
            sampling=sampling,
        )
        for prompt in prompts
    ]


async def _score(parts: RunContext, prompt: Prompt, *, future: Answers) -> Group:
    return Group(prompt, await score_samples(parts, prompt, completions=await future))
