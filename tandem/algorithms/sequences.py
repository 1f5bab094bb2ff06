# SPDX-License-Identifier: Apache-2.0
"""Reductions over the flat layout: R response tokens of N sequences in order, without padding.

``sequence_R`` (int64) holds the sequence of each token, ascending from 0. A sequence may have no
token. Nothing here loops over tokens or synchronises with the device.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.types import LossInputs

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
"""The values of ``actor_rollout_ref.actor.loss_agg_mode``."""


def sum_by_sequence(values_R: Tensor, sequence_R: Tensor, *, num_sequences: int) -> Tensor:
    """Sum over each sequence's tokens, (N,); differentiable."""
    return values_R.new_zeros(num_sequences).index_add(0, sequence_R, values_R)


def count_by_sequence(
    sequence_R: Tensor, num_sequences: int, *, kept_R: Tensor | None = None
) -> Tensor:
    """Count the tokens of each sequence, or those of ``kept_R`` (bool) only, fp32 (N,)."""
    if kept_R is None:
        kept_R = torch.ones(sequence_R.shape, dtype=torch.float32, device=sequence_R.device)
    return sum_by_sequence(kept_R.float(), sequence_R, num_sequences=num_sequences)


def last_tokens(sequence_R: Tensor) -> Tensor:
    """Return whether each token is the last of its sequence, bool (R,)."""
    is_last_R = torch.ones_like(sequence_R, dtype=torch.bool)
    is_last_R[:-1] = sequence_R[1:] != sequence_R[:-1]
    return is_last_R


def shift_from_next(values_R: Tensor, sequence_R: Tensor) -> Tensor:
    """Return the value of the next token of the same sequence, 0 after the last one, (R,)."""
    shifted_R = torch.zeros_like(values_R)
    same_R = sequence_R[1:] == sequence_R[:-1]
    shifted_R[:-1] = torch.where(same_R, values_R[1:], 0.0)
    return shifted_R


def discounted_suffix_sum(values_R: Tensor, sequence_R: Tensor, *, discount: float) -> Tensor:
    """Compute ``y_t = x_t + discount * y_(t+1)`` within each sequence, (R,)."""
    # After k rounds of doubling y_t covers 2^k tokens: log2(R) rounds are enough.
    total_R = values_R.clone()
    reach, factor = 1, discount
    while reach < len(values_R):
        same_R = sequence_R[reach:] == sequence_R[:-reach]
        addend_R = torch.where(same_R, factor * total_R[reach:], 0.0)
        total_R = torch.cat((total_R[:-reach] + addend_R, total_R[-reach:]))
        reach, factor = 2 * reach, factor * factor
    return total_R


def aggregate(
    values_R: Tensor, inputs: LossInputs, *, mode: str, scale_factor: float | None
) -> Tensor:
    """Reduce ``values_R`` to this micro-batch's share of the aggregate, a scalar.

    The denominators cover the whole optimizer step (``LossScale``): the shares of all micro-batches
    and ranks add up to the value of the undivided batch. ``token-mean`` weighs all tokens equally
    (DAPO, arXiv:2503.14476), ``seq-mean-token-mean`` all sequences (GRPO, arXiv:2402.03300).
    ``seq-mean-token-sum-norm`` divides by the constant ``scale_factor`` instead of a length
    (Dr.GRPO, arXiv:2503.20783); the other modes ignore it.

    Rejected tokens (``LossInputs.kept_R``) take no part, nor do they count in the length of their
    sequence. The denominators of the step count them.

    Raises:
        ValueError: the mode is unknown, or its scale factor is missing.
    """
    if inputs.kept_R is not None:
        values_R = torch.where(inputs.kept_R, values_R, 0.0)
    if mode == "token-mean":
        return values_R.sum() / inputs.scale.num_tokens
    if mode == "token-sum":
        return values_R.sum()
    if mode == "seq-mean-token-sum":
        return values_R.sum() / inputs.scale.num_sequences
    if mode == "seq-mean-token-mean":
        sum_N = sum_by_sequence(values_R, inputs.sequence_R, num_sequences=inputs.num_sequences)
        length_N = count_by_sequence(inputs.sequence_R, inputs.num_sequences, kept_R=inputs.kept_R)
        return (sum_N / length_N.clamp(min=1)).sum() / inputs.scale.num_sequences
    if mode == "seq-mean-token-sum-norm" and scale_factor:
        return values_R.sum() / (scale_factor * inputs.scale.num_sequences)
    raise ValueError(
        f"loss_agg_mode={mode!r} with loss_scale_factor={scale_factor}: no such aggregation. Use "
        f"one of {', '.join(AGGREGATIONS)}; {AGGREGATIONS[-1]} needs a positive loss_scale_factor."
    )


def token_mean(values_R: Tensor, inputs: LossInputs) -> Tensor:
    """Return this micro-batch's share of the mean over the optimizer step's tokens, detached."""
    return values_R.detach().float().sum() / inputs.scale.num_tokens
