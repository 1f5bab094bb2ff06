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

from tandem.metrics.records import dump_samples
from tandem.metrics.validation import validation_metrics, validation_samples
from tandem.pipeline.failures import require_fresh, warn_of_failed_rewards
from tandem.pipeline.parts import PipelineParts
from tandem.pipeline.producer import score_samples
from tandem.pipeline.router import RolloutRouter
from tandem.pipeline.weights import WeightFlow
from tandem.types import (
    VALIDATION_SAMPLE_ID_BASE,
    Completion,
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

    def __init__(self, parts: PipelineParts, router: RolloutRouter, *, flow: WeightFlow) -> None:
        self._parts = parts
        self._router = router
        self._flow = flow
        self.metrics: Metrics = {}
        self.step = -1

    def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[Metrics]:
        """Validate the version in use, which stays so until all is generated."""
        self.step = self._flow.in_use
        self._flow.pin()
        return tasks.create_task(self._validate(self.step))

    async def _validate(self, step: int) -> Metrics:
        begin_s = self._parts.clock()
        with self._parts.trace.span("validation", "validation", details={"step": step}):
            groups = await self._generate_and_score()
        require_fresh(groups, version=step, max_lag=0)
        warn_of_failed_rewards(groups, f"validation of step {step}")
        self._dump(step, groups)
        self.metrics = summarize(groups)
        return {**self.metrics, VALIDATION_SECONDS: self._parts.clock() - begin_s}

    async def _generate_and_score(self) -> tuple[Group, ...]:
        """``val_kwargs.n`` samples of every validation prompt, in row order."""
        parts = self._parts
        num_samples = parts.config.actor_rollout_ref.rollout.val_kwargs.n
        requests = validation_requests(
            parts.validation_prompts, num_samples, sampling=validation_sampling(parts)
        )
        futures = self._router.submit(requests)
        async with asyncio.TaskGroup() as tasks:
            scoring = [
                tasks.create_task(_score(parts, prompt, future=future))
                for prompt, future in zip(parts.validation_prompts, futures, strict=True)
            ]
            await asyncio.gather(*futures)
            await self._flow.unpin()
        return tuple(task.result() for task in scoring)

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


def validation_sampling(parts: PipelineParts) -> SamplingParams:
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


async def _score(
    parts: PipelineParts, prompt: Prompt, *, future: asyncio.Future[tuple[Completion, ...]]
) -> Group:
    return Group(prompt, await score_samples(parts, prompt, completions=await future))
