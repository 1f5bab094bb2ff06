# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning; satisfies ``tandem.api.Loss``.

Mean negative log-likelihood over all response tokens of the optimizer step (all micro-batches, all
ranks). Which tokens are response tokens was decided when the batch was packed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class SftLoss:
    """Token-mean negative log-likelihood; reports it as ``train/loss``. Needs no columns."""

    needs_entropy = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """This micro-batch's share of the loss."""
        loss = -inputs.score_R.sum() / inputs.scale.num_tokens
        return LossOutputs(loss=loss, metrics={"train/loss": loss.detach()})
