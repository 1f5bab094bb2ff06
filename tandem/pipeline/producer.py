# SPDX-License-Identifier: Apache-2.0
"""From prompts to scored groups: admission, generation, reward, dynamic sampling.

A round is what one admission lets in. Groups that dynamic sampling drops give their slots back at
the end of their round, together, so that with a lag of 0 the composition of every batch is
reproducible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.algorithms.filtering import is_informative
from tandem.errors import UserError
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.parts import PipelineParts
from tandem.pipeline.router import RolloutRouter
from tandem.types import (
    Completion,
    GenerationRequest,
    Group,
    Prompt,
    RewardRequest,
    Sample,
    SamplingParams,
)


class GroupProducer:
    """Consumes: prompts. Waits for: slots. Unblocked by: releases of the gate. Produces: groups in
    the buffer.
    """

    def __init__(
        self,
        parts: PipelineParts,
        *,
        gate: AdmissionGate,
        router: RolloutRouter,
        buffer: GroupBuffer,
    ) -> None:
        self._parts = parts
        self._gate = gate
        self._router = router
        self._buffer = buffer
        rollout = parts.config.actor_rollout_ref.rollout
        self._num_samples = rollout.n
        self._sampling = training_sampling(parts)
        self._dropped_uids: list[int] = []

    def take_dropped(self) -> list[int]:
        """The draws that dynamic sampling dropped since the last call."""
        uids, self._dropped_uids = self._dropped_uids, []
        return uids

    async def run(self) -> None:
        """Produce until everything wanted has been trained on or the data has ended; then close the
        buffer.
        """
        async with asyncio.TaskGroup() as rounds:
            while (count := await self._gate.admit()) > 0:
                prompts = self._parts.source.draw(count)
                if len(prompts) < count:
                    await self._gate.release_dropped(count - len(prompts))
                if not prompts:
                    break
                rounds.create_task(self._produce_round(prompts))
        await self._buffer.close()

    async def _produce_round(self, prompts: Sequence[Prompt]) -> None:
        requests = [
            GenerationRequest(
                sample_ids=tuple(
                    prompt.uid * self._num_samples + k for k in range(self._num_samples)
                ),
                prompt_ids=prompt.token_ids,
                sampling=self._sampling,
            )
            for prompt in prompts
        ]
        futures = self._router.submit(requests)
        async with asyncio.TaskGroup() as groups:
            tasks = [
                groups.create_task(self._finish_group(prompt, future))
                for prompt, future in zip(prompts, futures, strict=True)
            ]
        dropped = [p.uid for p, task in zip(prompts, tasks, strict=True) if not task.result()]
        if dropped:
            self._dropped_uids.extend(dropped)
            self._check_dropped()
            await self._gate.release_dropped(len(dropped))

    async def _finish_group(
        self, prompt: Prompt, future: asyncio.Future[tuple[Completion, ...]]
    ) -> bool:
        """Score a generated group and pass it on; False if dynamic sampling drops it."""
        group = Group(prompt, await score_samples(self._parts, prompt, completions=await future))
        filter_groups = self._parts.config.algorithm.filter_groups
        if filter_groups.enable and not is_informative(group, filter_groups.metric):
            return False
        await self._buffer.put(group)
        return True

    def _check_dropped(self) -> None:
        config = self._parts.config
        limit = config.algorithm.filter_groups.max_num_gen_batches
        num_dropped = len(self._dropped_uids)
        size = config.data.gen_batch_size or config.data.train_batch_size
        if 0 < limit * size < num_dropped + config.data.train_batch_size:
            raise UserError(
                f"algorithm.filter_groups.max_num_gen_batches={limit}: {num_dropped} groups of "
                "this step had equal rewards and were dropped. Take easier or harder prompts, "
                "raise the limit, or set algorithm.filter_groups.enable=False."
            )


def training_sampling(parts: PipelineParts) -> SamplingParams:
    """The sampling parameters of training rollouts."""
    rollout = parts.config.actor_rollout_ref.rollout
    return SamplingParams(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=parts.config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )


async def score_samples(
    parts: PipelineParts, prompt: Prompt, *, completions: Sequence[Completion]
) -> tuple[Sample, ...]:
    """Decode and score the completions of one prompt."""
    texts = parts.codec.decode([completion.token_ids for completion in completions])
    requests = [
        RewardRequest(
            data_source=prompt.data_source,
            solution=text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            num_tokens=len(completion.token_ids),
        )
        for completion, text in zip(completions, texts, strict=True)
    ]
    outcomes = await parts.rewards.score(requests)
    return tuple(
        Sample(completion, text, outcome)
        for completion, text, outcome in zip(completions, texts, outcomes, strict=True)
    )
