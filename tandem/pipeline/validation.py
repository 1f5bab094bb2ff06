# SPDX-License-Identifier: Apache-2.0
"""Validation: the whole validation set through the same rollout, scored and averaged by data
source.

Sample ids of validation have a range of their own, the same at every validation: sampled
validations of two steps draw the same random numbers and differ by the weights alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.metrics.validation import validation_metrics, validation_samples
from tandem.pipeline.parts import PipelineParts
from tandem.pipeline.producer import score_samples
from tandem.pipeline.router import RolloutRouter
from tandem.types import (
    VALIDATION_SAMPLE_ID_BASE,
    Completion,
    GenerationRequest,
    Group,
    Prompt,
    SamplingParams,
)


async def validate(parts: PipelineParts, router: RolloutRouter) -> tuple[Group, ...]:
    """Generate and score ``val_kwargs.n`` samples of every validation prompt, in row order."""
    kwargs = parts.config.actor_rollout_ref.rollout.val_kwargs
    requests = validation_requests(
        parts.validation_prompts, kwargs.n, sampling=validation_sampling(parts)
    )
    futures = router.submit(requests)
    async with asyncio.TaskGroup() as tasks:
        scoring = [
            tasks.create_task(_score(parts, prompt, future=future))
            for prompt, future in zip(parts.validation_prompts, futures, strict=True)
        ]
    return tuple(task.result() for task in scoring)


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
