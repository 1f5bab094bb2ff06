# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.types import LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class SftLoss:
    """The mean negative log-likelihood over all response tokens of the optimizer step."""

    needs_entropy = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return this micro-batch's share of the loss."""
        loss = -inputs.score_R.sum() / inputs.scale.num_tokens
        return LossOutputs(loss=loss, metrics={"train/loss": loss.detach()})
