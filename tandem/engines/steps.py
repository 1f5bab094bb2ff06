# SPDX-License-Identifier: Apache-2.0
"""The functions that all training engines share; they communicate with no other process.

Shapes: R response tokens, L tokens that a process computes, D hidden.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tandem.api import Loss, Scores
from tandem.models.language_model import LanguageModel, TokenScores, score_hidden
from tandem.models.operators import upload
from tandem.types import (
    LossColumns,
    LossInputs,
    LossOutputs,
    LossScale,
    PackedBatch,
    UpdateReport,
)

logger = logging.getLogger(__name__)


@torch.no_grad()
def score(model: LanguageModel, batch: PackedBatch, *, temperature: float) -> Scores:
    """Return log-probs, or values, of the response tokens, and what else the batch asks for."""
    return score_of(model, batch, h_LD=model.hidden(batch), temperature=temperature)


@torch.no_grad()
def score_of(
    model: LanguageModel, batch: PackedBatch, *, h_LD: Tensor, temperature: float
) -> Scores:
    """Return the result of ``score`` from the hidden states of a batch."""
    scores = score_hidden(model, batch, h_LD=h_LD, temperature=temperature, with_entropy=False)
    score_R = scores.score_R
    if scores.squares_R is not None:
        score_R = torch.stack((score_R, scores.squares_R), dim=1)
    return Scores(score_R.cpu(), recorded_routes(model, batch))


def recorded_routes(model: LanguageModel, batch: PackedBatch) -> Tensor | None:
    """Return the routes of the latest pass, over ``batch``, on the CPU; None if it asks for none.

    A stage of layers has those of its layers, None if all of them are dense.
    """
    routes_TLK = model.recorded_routes() if batch.with_routes else None
    return None if routes_TLK is None else routes_TLK.cpu()


def backward(
    model: LanguageModel, batch: PackedBatch, *, loss: Loss, scale: LossScale, temperature: float
) -> LossOutputs:
    """Accumulate the gradients of a micro-batch in the model's parameters."""
    outputs = loss_of(
        model, batch, h_LD=model.hidden(batch), loss=loss, scale=scale, temperature=temperature
    )
    outputs.loss.backward()
    routers = router_metrics(model, batch, scale=scale)
    return replace(outputs, metrics={**outputs.metrics, **routers}) if routers else outputs


def loss_of(
    model: LanguageModel,
    batch: PackedBatch,
    *,
    h_LD: Tensor,
    loss: Loss,
    scale: LossScale,
    temperature: float,
) -> LossOutputs:
    """Return the loss of a micro-batch from its hidden states."""
    scores = score_hidden(
        model, batch, h_LD=h_LD, temperature=temperature, with_entropy=loss.needs_entropy
    )
    return loss(_loss_inputs(batch, scores, scale=scale))


def idle_loss(model: LanguageModel, batch: PackedBatch, *, h_LD: Tensor) -> Tensor:
    """Return a loss of 0 that depends on all parameters, as collectives of gradients require."""
    scores = score_hidden(model, batch, h_LD=h_LD, temperature=1.0, with_entropy=False)
    return scores.score_R.sum() * 0.0


def router_metrics(
    model: LanguageModel, batch: PackedBatch, *, scale: LossScale
) -> dict[str, Tensor]:
    """Return the part of the latest pass in the metrics of the routers of a step.

    The parts of micro-batches add up to a mean over the loss tokens of the step.
    """
    share = len(batch.target_R) / scale.num_tokens
    return {name: value * share for name, value in model.router_metrics().items()}


@dataclass
class Totals:
    """The sums of loss and metrics over micro-batches, as scalar tensors."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, outputs: LossOutputs) -> None:
        self.loss = self.loss + outputs.loss.detach()
        self.add_metrics(outputs.metrics)

    def add_metrics(self, metrics: Mapping[str, Tensor]) -> None:
        for name, value in metrics.items():
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


def clip(gradients: Sequence[Tensor], norm: Tensor, *, limit: float) -> None:
    """Scale gradients in place so that their total ``norm`` is at most ``limit``."""
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(list(gradients), factor)  # pyright: ignore[reportPrivateImportUsage]


def report_step(
    loss: float, norm: float, *, metrics: Mapping[str, float], rate: float
) -> UpdateReport:
    """Return the report of a step, which is to be skipped if loss or norm is not finite."""
    skipped = not (math.isfinite(loss) and math.isfinite(norm))
    if skipped:
        logger.warning("update skipped: loss %s, gradient norm %s", loss, norm)
    return UpdateReport(metrics=metrics, grad_norm=norm, learning_rate=rate, skipped=skipped)


def _loss_inputs(batch: PackedBatch, scores: TokenScores, *, scale: LossScale) -> LossInputs:
    device = scores.score_R.device
    return LossInputs(
        score_R=scores.score_R,
        entropy_R=scores.entropy_R,
        sequence_R=upload(batch.sequence_R, device),
        num_sequences=batch.num_sequences,
        columns=_columns_on(batch.columns, device),
        scale=scale,
    )


def _columns_on(columns: LossColumns | None, device: torch.device) -> LossColumns | None:
    return None if columns is None else columns.map(lambda column_R: upload(column_R, device))
