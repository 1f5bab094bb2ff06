# SPDX-License-Identifier: Apache-2.0
"""A mini-batch of five prompts with three responses each, cut into micro-batches, and losses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.algorithms.sft import SftLoss
from tandem.algorithms.value_loss import ValueLoss
from tandem.data.packing import TrainSequence, pack_microbatches, plan_microbatches
from tandem.types import LossColumns, LossInputs, LossOutputs, LossScale, PackedBatch
from tests.fakes.losses import WITH_ALL_TERMS

LOSS = WITH_ALL_TERMS
VALUE_LOSS = ValueLoss(
    cliprange_value=0.2, loss_agg_mode="seq-mean-token-mean", loss_scale_factor=None
)


@dataclass(frozen=True)
class PoisonedLoss:
    """An SFT loss that is multiplied by ``value`` in micro-batches of so many response tokens."""

    value: float
    num_tokens: int

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        outputs = SftLoss()(inputs)
        if len(inputs.score_R) != self.num_tokens:
            return outputs
        return LossOutputs(loss=outputs.loss * self.value, metrics=outputs.metrics)


def _draw_sequences() -> list[TrainSequence]:
    rng = random.Random(2)

    def draw(shortest: int, longest: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 60) for _ in range(rng.randint(shortest, longest)))

    prompts = [draw(2, 12) for _ in range(5)]
    return [TrainSequence(i // 3, prompts[i // 3], draw(1, 9)) for i in range(15)]


SEQUENCES = _draw_sequences()
NUM_TOKENS = sum(sequence.num_loss_tokens for sequence in SEQUENCES)
SCALE = LossScale(num_tokens=NUM_TOKENS, num_sequences=len(SEQUENCES))


def cut_batches(
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    *,
    sequences: Sequence[TrainSequence] = SEQUENCES,
) -> list[PackedBatch]:
    """Return the mini-batch with all inputs of losses, in micro-batches of at most that size.

    Other ``sequences`` have the same responses.
    """
    generator = torch.Generator().manual_seed(1)
    columns = LossColumns(
        advantages_R=torch.randn(NUM_TOKENS, generator=generator),
        old_logp_R=-4 + 0.1 * torch.randn(NUM_TOKENS, generator=generator),
        ref_logp_R=-4 + 0.1 * torch.randn(NUM_TOKENS, generator=generator),
        values_R=0.1 * torch.randn(NUM_TOKENS, generator=generator),
        returns_R=torch.randn(NUM_TOKENS, generator=generator),
    )
    plan = plan_microbatches(sequences, max_sequences=max_sequences, max_tokens=max_tokens)
    return pack_microbatches(sequences, plan, columns=columns)
