# SPDX-License-Identifier: Apache-2.0
"""The producer of scored groups: admission, generation, reward, dynamic sampling.

The slot of a group that dynamic sampling drops goes to the next draw. In lockstep this happens once
all groups of one admission are complete, for all dropped ones together, so that the composition of
every batch is reproducible. For ``remax`` each prompt is answered once more, greedily, and the
reward of that answer goes with the group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from tandem.algorithms.filtering import is_informative
from tandem.errors import UserError
from tandem.metrics.activity import Phase
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.episodes import (
    Answers,
    EpisodePlayer,
    outcome_of_end,
    reward_context,
    trajectories_of,
)
from tandem.pipeline.failures import (
    GENERATION_FAILED,
    PENDING,
    RewardGuard,
    warn_of_failed_baseline,
    warn_of_failed_rewards,
)
from tandem.pipeline.rollout_loop import RolloutLoop
from tandem.types import (
    FinishReason,
    GenerationRequest,
    Group,
    Prompt,
    RewardOutcome,
    RewardRequest,
    Sample,
    SamplingParams,
    Trajectory,
)

logger = logging.getLogger(__name__)

BASELINE_SAMPLE_ID_BASE = 1 << 59
"""The first sample id of greedy baselines. Their range ends where that of validation begins."""


class GroupProducer:
    """The task that turns prompts into scored groups in the buffer.

    It waits for admission slots and is unblocked by releases of the gate.

    Args:
        version: returns the version of the weights in use.

    Attributes:
        failure: the reason why the run cannot go on: its rewards fail, a prompt cannot be used, or
            too many groups are dropped. None until then. The buffer is closed, and the steps that
            were trained on remain.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        gate: AdmissionGate,
        rollout: RolloutLoop,
        buffer: GroupBuffer,
        version: Callable[[], int],
    ) -> None:
        self._context = context
        self._gate = gate
        self._rollout = rollout
        self._player = EpisodePlayer(rollout, context.conversing, trace=context.trace)
        self._buffer = buffer
        self._version = version
        self._num_samples = context.config.actor_rollout_ref.rollout.n
        self._sampling = training_sampling(context)
        self._has_baseline = context.config.algorithm.estimator.needs_baseline_rollout
        self._rewards = RewardGuard(context.config.sequences_per_step, config=context.config)
        self.failure: UserError | None = None
        self._dropped_uids: list[int] = []
        self._decoding = asyncio.Lock()

    def take_dropped(self) -> list[int]:
        """Return the draws that dynamic sampling dropped since the last call."""
        uids, self._dropped_uids = self._dropped_uids, []
        return uids

    async def run(self) -> None:
        """Produce until all wanted prompts were trained on or the data ended; close the buffer."""
        async with asyncio.TaskGroup() as rounds:
            while (count := await self._admit()) > 0:
                prompts = await self._draw(count)
                if not prompts:
                    break
                size = count if self._context.config.trainer.lockstep else 1
                for start in range(0, len(prompts), size):
                    rounds.create_task(self._produce(prompts[start : start + size]))
                await asyncio.sleep(0)  # submit them before asking the rollout for room
        await self._buffer.close()

    async def _admit(self) -> int:
        """Return how many prompts may be drawn: each has a slot, and soon rows in the engine."""
        room = await self._rollout.room()
        return await self._gate.admit(None if room is None else -(-room // self._num_samples))

    async def _draw(self, count: int) -> list[Prompt]:
        """Draw prompts for ``count`` charged slots; fewer at the end of the data."""
        try:
            prompts = self._context.source.draw(count)
        except UserError as error:
            await self._fail(error)
            prompts = []
        self._buffer.expect([prompt.uid for prompt in prompts], self._version())
        if len(prompts) < count:
            await self._gate.release_dropped(count - len(prompts))
        self._context.trace.mark("generate", "admitted", details={"count": len(prompts)})
        return prompts

    async def _produce(self, prompts: Sequence[Prompt]) -> None:
        """Complete the groups of ``prompts``, and others in place of dropped ones."""
        while prompts:
            dropped = await self._produce_once(prompts)
            prompts = await self._draw(len(dropped)) if dropped else []
            await self._buffer.drop(dropped)
            if self.failure is not None:
                return

    async def _produce_once(self, prompts: Sequence[Prompt]) -> list[int]:
        """Complete the groups of ``prompts`` and return the draws of those that were dropped."""
        futures = self._player.start(prompts, [self._request(prompt) for prompt in prompts])
        baselines: Sequence[Answers | None] = [None] * len(prompts)
        if self._has_baseline:
            requests = [self._baseline_request(prompt) for prompt in prompts]
            baselines = self._player.start(prompts, requests)
        tasks: list[asyncio.Task[Group | None]] = []
        with self._show(tasks, num_prompts=len(prompts)):
            async with asyncio.TaskGroup() as groups:
                tasks += [
                    groups.create_task(self._finish_group(prompt, future, baseline=baseline))
                    for prompt, future, baseline in zip(prompts, futures, baselines, strict=True)
                ]
        dropped = [group for task in tasks if (group := task.result()) is not None]
        if dropped:
            logger.info(
                "dynamic sampling: %d of %d groups dropped, others are drawn in their place",
                len(dropped),
                len(prompts),
            )
            warn_of_failed_rewards(dropped, "dropped groups")
        uids = [group.prompt.uid for group in dropped]
        self._dropped_uids.extend(uids)
        await self._check_dropped()
        return uids

    @contextmanager
    def _show(
        self, tasks: Sequence[asyncio.Task[Group | None]], *, num_prompts: int
    ) -> Generator[None, None, None]:
        """Show how many samples are generated and scored, if they are those of one step."""
        if self._context.config.trainer.max_lag > 0:
            yield
            return
        activity, num_answers = self._context.activity, self._num_samples + self._has_baseline
        total = num_prompts * num_answers

        def scored() -> int:
            return num_answers * sum(task.done() for task in tasks)

        with (
            activity.during(
                Phase.GENERATING, total=total, done=lambda: total - self._rollout.num_unfinished
            ),
            activity.during(Phase.REWARDS, total=total, done=scored),
        ):
            yield

    def _request(self, prompt: Prompt) -> GenerationRequest:
        first = prompt.uid * self._num_samples
        ids = tuple(range(first, first + self._num_samples))
        return GenerationRequest(ids, prompt.token_ids, self._sampling, pictures=prompt.pictures)

    def _baseline_request(self, prompt: Prompt) -> GenerationRequest:
        greedy = replace(self._sampling, temperature=0.0)
        ids = (BASELINE_SAMPLE_ID_BASE + prompt.uid,)
        return GenerationRequest(ids, prompt.token_ids, greedy, pictures=prompt.pictures)

    async def _finish_group(
        self, prompt: Prompt, future: Answers, *, baseline: Answers | None
    ) -> Group | None:
        """Score a generated group and buffer it; return it if dynamic sampling drops it.

        A reward model scores later, when there is a batch.
        """
        answers = [*await future, *(() if baseline is None else await baseline)]
        trajectories = trajectories_of(prompt, answers)
        generated_s = self._context.clock()
        with self._context.trace.span("reward", "reward"):
            # One group is decoded per iteration of the event loop. Meanwhile the rewards of groups
            # that ended at the same time are requested and returned.
            async with self._decoding:
                texts = decode_drawn(self._context, trajectories)
                await asyncio.sleep(0)
            scored = await self._score(prompt, trajectories, texts=texts)
        group = Group(prompt, scored[: self._num_samples])
        if not await self._may_go_on(group):
            return None
        filter_groups = self._context.config.algorithm.filter_groups
        if filter_groups.enable and not is_informative(group, filter_groups.metric):
            return group
        reference = None if baseline is None else scored[-1]
        if reference is not None:
            warn_of_failed_baseline(reference.reward)
        await self._buffer.put(replace(group, baseline=reference, generated_s=generated_s))
        return None

    async def _may_go_on(self, group: Group) -> bool:
        try:
            self._rewards.check(group.samples)
        except UserError as error:
            await self._fail(error)
        return self.failure is None

    async def _fail(self, error: UserError) -> None:
        self.failure = self.failure or error
        await self._buffer.close()

    async def _score(
        self, prompt: Prompt, trajectories: Sequence[Trajectory], *, texts: Sequence[str]
    ) -> tuple[Sample, ...]:
        if self._context.config.reward_model.enable:
            return _judged(trajectories, texts, outcomes=[PENDING] * len(texts))
        return await score_texts(self._context, prompt, trajectories=trajectories, texts=texts)

    async def _check_dropped(self) -> None:
        config = self._context.config
        num_dropped = len(self._dropped_uids)
        if 0 < config.most_prompts_generated < num_dropped + config.data.train_batch_size:
            error = UserError(
                "algorithm.filter_groups.max_num_gen_batches",
                config.algorithm.filter_groups.max_num_gen_batches,
                rule=f"{num_dropped} groups of this step had equal or failed rewards and were "
                "dropped",
                remedy="Take easier or harder prompts, raise the limit, or set "
                "algorithm.filter_groups.enable=False.",
            )
            await self._fail(error)


def training_sampling(context: RunContext) -> SamplingParams:
    """Return the sampling parameters of training rollouts."""
    rollout = context.config.actor_rollout_ref.rollout
    return SamplingParams(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_new_tokens=context.config.data.max_response_length,
        ignore_eos=rollout.ignore_eos,
    )


def decode_drawn(context: RunContext, trajectories: Sequence[Trajectory]) -> list[str]:
    """Return the text that the policy drew in each trajectory, its turns joined by a newline."""
    turns = [trajectory.completions for trajectory in trajectories]
    texts = iter(context.codec.decode([turn.token_ids for of_one in turns for turn in of_one]))
    return ["\n".join(next(texts) for _ in of_one) for of_one in turns]


async def score_samples(
    context: RunContext, prompt: Prompt, *, trajectories: Sequence[Trajectory]
) -> tuple[Sample, ...]:
    """Decode and score the trajectories of one prompt."""
    texts = decode_drawn(context, trajectories)
    return await score_texts(context, prompt, trajectories=trajectories, texts=texts)


async def score_texts(
    context: RunContext,
    prompt: Prompt,
    *,
    trajectories: Sequence[Trajectory],
    texts: Sequence[str],
) -> tuple[Sample, ...]:
    """Score the trajectories of one prompt with its rule or function.

    A reward reads drawn text only: a tool that returns the answer earns nothing. A failed episode
    is not scored.
    """
    faults = [outcome_of_end(trajectory) for trajectory in trajectories]
    requests = [
        RewardRequest(
            data_source=prompt.data_source,
            solution=text,
            ground_truth=prompt.ground_truth,
            extra_info=reward_context(prompt, trajectory),
            num_tokens=len(trajectory.response_ids),
            prompt=prompt.messages,
        )
        for trajectory, text, fault in zip(trajectories, texts, faults, strict=True)
        if fault is None
    ]
    scored = iter(await context.rewards.score(requests))
    outcomes = [next(scored) if fault is None else fault for fault in faults]
    return _judged(trajectories, texts, outcomes=outcomes)


def _judged(
    trajectories: Sequence[Trajectory],
    texts: Sequence[str],
    *,
    outcomes: Sequence[RewardOutcome],
) -> tuple[Sample, ...]:
    """Return samples with their outcomes; a failed generation or episode has none of its own."""
    return tuple(
        Sample(trajectory, text, _fault_of(trajectory) or outcome)
        for trajectory, text, outcome in zip(trajectories, texts, outcomes, strict=True)
    )


def _fault_of(trajectory: Trajectory) -> RewardOutcome | None:
    if any(drawn.finish_reason is FinishReason.FAILED for drawn in trajectory.completions):
        return GENERATION_FAILED
    return outcome_of_end(trajectory)
