# SPDX-License-Identifier: Apache-2.0
"""From a number per response token to a scalar, with denominators of the whole optimizer step.

The denominators come in as ``LossScale``, so the scalars of the micro-batches of one step (on all
ranks) add up to the value of the uncut batch. What this is not: a mean over the micro-batch at
hand.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from tandem.algorithms.sequences import count_by_sequence, sum_by_sequence
from tandem.types import LossInputs

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
"""The values of ``actor_rollout_ref.actor.loss_agg_mode``."""


def aggregate(
    values_R: Tensor, inputs: LossInputs, *, mode: str, scale_factor: float | None
) -> Tensor:
    """Reduce ``values_R`` to this micro-batch's share of the aggregate, a scalar.

    ``token-mean`` weighs all tokens alike (DAPO, arXiv:2503.14476), ``seq-mean-token-mean`` all
    sequences alike (GRPO, arXiv:2402.03300), ``seq-mean-token-sum-norm`` divides by the constant
    ``scale_factor`` instead of a length (Dr.GRPO, arXiv:2503.20783); only that mode reads it.

    Raises:
        ValueError: the mode is unknown, or lacks its scale factor.
    """
    if mode == "token-mean":
        return values_R.sum() / inputs.scale.num_tokens
    if mode == "token-sum":
        return values_R.sum()
    if mode == "seq-mean-token-sum":
        return values_R.sum() / inputs.scale.num_sequences
    if mode == "seq-mean-token-mean":
        sum_N = sum_by_sequence(values_R, inputs.sequence_R, num_sequences=inputs.num_sequences)
        length_N = count_by_sequence(inputs.sequence_R, inputs.num_sequences)
        return (sum_N / length_N.clamp(min=1)).sum() / inputs.scale.num_sequences
    if mode == "seq-mean-token-sum-norm" and scale_factor:
        return values_R.sum() / (scale_factor * inputs.scale.num_sequences)
    raise ValueError(
        f"loss_agg_mode={mode!r} with loss_scale_factor={scale_factor}: no such aggregation. "
        f"Use one of {', '.join(AGGREGATIONS)}; the last one needs a positive loss_scale_factor."
    )


def token_mean(values_R: Tensor, inputs: LossInputs) -> Tensor:
    """Share of the mean over all tokens of the optimizer step, detached; bool counts as 0 and 1."""
    return values_R.detach().float().sum() / inputs.scale.num_tokens
