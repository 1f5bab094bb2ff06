# SPDX-License-Identifier: Apache-2.0
"""The phase of a training step in which the reward model scores each response.

The score is the model's value at the last token of the response, which is the end of sequence if
one was drawn. As in verl, it is the reward of training for every row, while rules and functions
score validations. A score that is not finite is a failed reward.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

from torch import Tensor

from tandem.config.derived.pools import REWARD_MODEL
from tandem.config.schema.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.data.tokenizer import ChatRefused
from tandem.errors import UserError
from tandem.pipeline.batch import as_floats, sequence_of
from tandem.pipeline.context import Conversations, RunContext
from tandem.pipeline.failures import warn_of_failed_baseline
from tandem.pipeline.optimizer_steps import limits_of, score_sequences
from tandem.rewards.scoring import OverlongBuffer, shape_outcome
from tandem.types import Group, Prompt, RewardOutcome, RewardStatus, Sample

_ANY_TOKEN = 0

Answer = tuple[Prompt, Sample]


async def score_with_reward_model(context: RunContext, groups: Sequence[Group]) -> list[Group]:
    """Return the groups and their greedy baselines with the scores of the reward model.

    Raises:
        UserError: none of the scores is finite.
    """
    answers = [(group.prompt, sample) for group in groups for sample in _samples(group)]
    scores = as_floats(await _scores(context, answers))
    if not any(map(math.isfinite, scores)):
        raise UserError(
            "reward_model.model.path",
            context.config.reward_model.model.path,
            rule=f"none of its {len(scores)} scores of a batch is finite",
            remedy="Use another model or precision (reward_model.model.fsdp_config.dtype).",
        )
    buffer = overlong_buffer(context.config)
    judged = iter(
        _judged(sample, score, buffer=buffer)
        for (_, sample), score in zip(answers, scores, strict=True)
    )
    return [_with_rewards(group, judged) for group in groups]


def overlong_buffer(config: RunConfig) -> OverlongBuffer | None:
    """Return the configured penalty on overlong responses; None without one."""
    manager = config.reward_model.reward_kwargs
    if config.reward_model.reward_manager != "dapo" or not manager.overlong_buffer_cfg.enable:
        return None
    return OverlongBuffer(
        max_tokens=manager.max_resp_len or config.data.max_response_length,
        buffer_tokens=manager.overlong_buffer_cfg.len,
        penalty_factor=manager.overlong_buffer_cfg.penalty_factor,
        log=manager.overlong_buffer_cfg.log,
    )


async def _scores(context: RunContext, answers: Sequence[Answer]) -> Tensor:
    """Return one score per answer, fp32 (N,)."""
    model, config = context.engines.reward_model, context.config.reward_model
    assert model is not None, "the run has a reward model"
    if context.conversations is None:
        sequences = [
            _with_scored_token(sequence_of(prompt, sample.trajectory)) for prompt, sample in answers
        ]
    else:
        try:
            sequences = await context.runtime.call(_rendered, context.conversations, answers)
        except ChatRefused as error:
            raise UserError(
                "reward_model.model.path",
                config.model.path,
                rule=f"a response {error}",
                remedy="Correct the template of the reward model.",
            ) from error
    # A conversation that is longer in the model's own tokens has a micro-batch to itself.
    longest = max(sequence.num_tokens for sequence in sequences)
    needed = -(-longest // model.sequence_parallel_size)
    limits = limits_of(context, REWARD_MODEL)
    if limits.max_tokens is not None:
        limits = replace(limits, max_tokens=max(limits.max_tokens, needed))
    return await score_sequences(context, model, sequences=sequences, limits=limits)


def _with_scored_token(sequence: TrainSequence) -> TrainSequence:
    """Append one loss token: its score is computed at the last token of the response.

    Of a conversation that forked, the row that ended last is scored.
    """
    row = sequence.branches[-1] if sequence.branches else sequence
    ids = array("i", row.response_ids)
    ids.append(_ANY_TOKEN)
    mask = (False,) * (len(ids) - 1) + (True,)
    return replace(row, response_ids=ids, loss_mask=mask, branches=())


def _rendered(conversations: Conversations, answers: Sequence[Answer]) -> list[TrainSequence]:
    """Return answers in the reward model's tokens; answers to one prompt share their prefix."""
    chats = [prompt.messages for prompt, _ in answers if not isinstance(prompt.messages, str)]
    rows = conversations.encode_answered(chats, [sample.text for _, sample in answers])
    sequences: list[TrainSequence] = []
    begun_alike = groupby(
        zip(answers, rows, strict=True), key=lambda pair: (pair[0][0].uid, pair[1][0])
    )
    for key, (_, pairs) in enumerate(begun_alike):
        own = [row for _, row in pairs]
        shared = _common_prefix(own)
        sequences += [
            _with_scored_token(TrainSequence(key, shared, row[len(shared) :])) for row in own
        ]
    return sequences


def _common_prefix(rows: Sequence[list[int]]) -> list[int]:
    first, last = min(rows), max(rows)
    shared = (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b)
    return first[: next(shared, len(first))]


def _judged(sample: Sample, score: float, *, buffer: OverlongBuffer | None) -> Sample:
    if sample.reward.status is not RewardStatus.PENDING:  # its generation failed
        return sample
    if not math.isfinite(score):
        detail = f"the reward model's score is {score}"
        return replace(sample, reward=RewardOutcome(RewardStatus.ERROR, math.nan, detail=detail))
    outcome = RewardOutcome(RewardStatus.VALUE, score)
    if buffer is not None:
        num_tokens = len(sample.trajectory.response_ids)
        outcome = shape_outcome(outcome, buffer, num_tokens=num_tokens)
    return replace(sample, reward=outcome)


def _samples(group: Group) -> Iterator[Sample]:
    return chain(group.samples, () if group.baseline is None else (group.baseline,))


def _with_rewards(group: Group, judged: Iterator[Sample]) -> Group:
    samples = tuple(next(judged) for _ in group.samples)
    baseline = None if group.baseline is None else next(judged)
    if baseline is not None:
        warn_of_failed_baseline(baseline.reward)
    return replace(group, samples=samples, baseline=baseline)
