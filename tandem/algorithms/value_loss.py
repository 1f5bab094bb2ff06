# SPDX-License-Identifier: Apache-2.0
"""The critic's loss: half the squared error of its values, clipped as PPO clips its ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.algorithms.sequences import aggregate, token_mean
from tandem.types import LossInputs, LossOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The clipped squared error ``0.5 * agg(max((v - G)^2, (clip(v, old - c, old + c) - G)^2))``.

    A value that has moved towards the return G by more than ``c`` has no gradient. The formula is
    verl's, after the code of arXiv:1707.06347.

    Attributes:
        cliprange_value: c.
        loss_agg_mode, loss_scale_factor: the aggregation, see ``PolicyLoss``.
    """

    cliprange_value: float
    loss_agg_mode: str
    loss_scale_factor: float | None

    needs_entropy = False

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Return this micro-batch's share of the loss; ``inputs.score_R`` holds the values."""
        columns = inputs.columns
        assert columns is not None, "a value loss needs LossColumns"
        old_R, returns_R = columns.values_R, columns.returns_R
        assert old_R is not None and returns_R is not None, "a value loss needs values and returns"
        value_R, reach = inputs.score_R, self.cliprange_value
        clipped_R = torch.clamp(value_R, old_R - reach, old_R + reach)
        error_R, clipped_error_R = (value_R - returns_R).square(), (clipped_R - returns_R).square()
        loss = 0.5 * aggregate(
            torch.maximum(error_R, clipped_error_R),
            inputs,
            mode=self.loss_agg_mode,
            scale_factor=self.loss_scale_factor,
        )
        metrics = {
            "critic/vf_loss": loss.detach(),
            "critic/vf_clipfrac": token_mean(clipped_error_R > error_R, inputs),
            "critic/vpred_mean": token_mean(value_R, inputs),
        }
        return LossOutputs(loss=loss, metrics=metrics)
