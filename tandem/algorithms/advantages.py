# SPDX-License-Identifier: Apache-2.0
"""Advantage estimators: from token rewards to an advantage and a return per response token.

An estimator is a function of ``AdvantageInputs`` and the keys of ``algorithm``. ``ADVANTAGES`` has
the built-in ones; docs/extend/advantage_estimator.md explains how to add one. A sequence whose
reward failed (timeout, error) is excluded from all statistics, and its advantage is 0. A group of
one sample has mean 0 and std 1, as in verl. If failures leave one sample in a group, its advantage
is 0. Everything runs on the CPU; statistics are in fp64.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.sequences import (
    count_by_sequence,
    discounted_suffix_sum,
    shift_from_next,
    sum_by_sequence,
)
from tandem.config.schema.algorithm import AlgorithmConfig
from tandem.config.schema.imports import import_dotted
from tandem.errors import UserError

_STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The rewards of one batch, and the layout of its tokens.

    Attributes:
        token_rewards_R: the rewards, fp32; a reward of the whole response is at its last token
            (``kl.place_scores``).
        sequence_R: the sequence of each token, int64, ascending.
        num_sequences: N.
        group_N: an identifier of the prompt of each sequence, int64.
        valid_N: whether the reward has a value, bool.
        values_R: the critic's values; None for an estimator that needs none.
        greedy_scores_N: the reward of the greedy response to the same prompt, NaN if that failed;
            None for an estimator that needs none.
        old_logp_R: the log-probs of the tokens under the policy before the update, if computed.
        squares_R: the sums of its squared probabilities; None for an estimator that needs none.
        weights_R: the importance weights of the tokens, if they are known before the update.
        parts_N: the numbers that the reward gave beside the score, by name, fp32; ``score`` is the
            score before any shaping. NaN where a sample has no such number.
    """

    token_rewards_R: Tensor
    sequence_R: Tensor
    num_sequences: int
    group_N: Tensor
    valid_N: Tensor
    values_R: Tensor | None = None
    greedy_scores_N: Tensor | None = None
    old_logp_R: Tensor | None = None
    squares_R: Tensor | None = None
    weights_R: Tensor | None = None
    parts_N: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages, and the returns that a critic learns, fp32 (R,)."""

    advantages_R: Tensor
    returns_R: Tensor


EstimatorFunction = Callable[[AdvantageInputs, AlgorithmConfig], Advantages]


@dataclass(frozen=True, slots=True)
class _Groups:
    """The statistics of each sequence's group, (N,), in fp64 so that equal scores centre to 0."""

    scores_N: Tensor
    mean_N: Tensor
    std_N: Tensor
    num_valid_N: Tensor
    group_N: Tensor
    alone_N: Tensor

    def total(self, values_N: Tensor) -> Tensor:
        return _group_total(values_N, self.group_N)


def _group_total(values_N: Tensor, group_N: Tensor) -> Tensor:
    return torch.zeros_like(values_N).index_add(0, group_N, values_N)[group_N]


def _numbered_from_zero(group_N: Tensor) -> Tensor:
    return torch.unique(group_N, return_inverse=True)[1]  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _valid_rewards(inputs: AdvantageInputs) -> Tensor:
    """Return the token rewards with 0 for failed sequences, whose rewards may be NaN, (R,)."""
    return torch.where(inputs.valid_N[inputs.sequence_R], inputs.token_rewards_R, 0.0)


def _group_statistics(inputs: AdvantageInputs, scores_N: Tensor | None = None) -> _Groups:
    """Return the statistics of ``scores_N``, by default of the sums of the token rewards."""
    if scores_N is None:
        rewards_R = _valid_rewards(inputs).double()
        scores_N = sum_by_sequence(rewards_R, inputs.sequence_R, num_sequences=inputs.num_sequences)
    else:
        scores_N = torch.where(inputs.valid_N, scores_N, 0.0).double()
    valid_N = inputs.valid_N.double()
    group_N = _numbered_from_zero(inputs.group_N)
    num_valid_N = _group_total(valid_N, group_N).clamp(min=1)
    alone_N = _group_total(torch.ones_like(valid_N), group_N) == 1
    mean_N = _group_total(scores_N, group_N) / num_valid_N
    deviation_N = (scores_N - mean_N) * valid_N
    variance_N = _group_total(deviation_N.square(), group_N) / (num_valid_N - 1).clamp(min=1)
    return _Groups(
        scores_N=scores_N,
        mean_N=torch.where(alone_N, 0.0, mean_N),
        std_N=torch.where(alone_N, 1.0, variance_N.sqrt()),
        num_valid_N=num_valid_N,
        group_N=group_N,
        alone_N=alone_N,
    )


def _broadcast(advantages_N: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Repeat each sequence's advantage over its tokens, 0 for failed sequences, fp32 (R,)."""
    return torch.where(inputs.valid_N, advantages_N, 0.0).float()[inputs.sequence_R]


def _outcome(advantages_N: Tensor, inputs: AdvantageInputs) -> Advantages:
    advantages_R = _broadcast(advantages_N, inputs)
    return Advantages(advantages_R, advantages_R)


def _whiten(values_R: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Scale to mean 0 and variance 1 over the tokens of valid sequences; 0 for others, (R,).

    Sums are in fp64, so that equal values become exactly 0.
    """
    values_R = values_R.double()
    valid_R = inputs.valid_N[inputs.sequence_R]
    count = valid_R.sum()
    mean = torch.where(valid_R, values_R, 0.0).sum() / count.clamp(min=1)
    centred_R = torch.where(valid_R, values_R - mean, 0.0)
    variance = centred_R.square().sum() / (count - 1).clamp(min=1)
    return (centred_R * torch.rsqrt(variance + _VARIANCE_EPSILON)).float()


def grpo(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Compute ``(R - mean) / (std + 1e-6)`` over the group, std unbiased (arXiv:2402.03300).

    With ``norm_adv_by_std_in_grpo=False`` compute ``R - mean`` (Dr.GRPO, arXiv:2503.20783).
    """
    return _outcome(_normalised(_group_statistics(inputs), settings), inputs)


def _normalised(groups: _Groups, settings: AlgorithmConfig) -> Tensor:
    centred_N = groups.scores_N - groups.mean_N
    if settings.norm_adv_by_std_in_grpo:
        centred_N = centred_N / (groups.std_N + _STD_EPSILON)
    return centred_N


def gdpo(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Scale each part of the reward over the group as ``grpo``, add them up with their weights, and
    whiten the sum over the tokens of the batch (arXiv:2601.05242).

    A part with a small spread counts as much as one with a large spread. Shaping of the total
    reward has no effect.

    Raises:
        UserError: a sample has no number of that name.
    """
    keys = settings.gdpo_reward_keys
    weights = settings.gdpo_reward_weights or (1.0,) * len(keys)
    total_N = torch.zeros(inputs.num_sequences, dtype=torch.float64)
    for key, weight in zip(keys, weights, strict=True):
        part_N = inputs.parts_N.get(key)
        if part_N is None or part_N[inputs.valid_N].isnan().any():
            raise _lacking_part(key, part_N, inputs=inputs)
        total_N += weight * _normalised(_group_statistics(inputs, part_N), settings)
    whitened_R = _whiten(_broadcast(total_N, inputs), inputs)
    return Advantages(whitened_R, whitened_R)


def _lacking_part(key: str, part_N: Tensor | None, *, inputs: AdvantageInputs) -> UserError:
    rule = (
        f"the reward of a sample has no number of this name (it has: {', '.join(inputs.parts_N)})"
    )
    if part_N is not None:
        num_lacking = int(part_N[inputs.valid_N].isnan().sum())
        num_valid = int(inputs.valid_N.sum())
        rule = f"{num_lacking} of {num_valid} samples have no number of this name"
    remedy = "Return it for every sample, or correct the name."
    return UserError("algorithm.gdpo_reward_keys", key, rule=rule, remedy=remedy)


def grpo_passk(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Give the best of a group its lead over the second best, the others 0 (arXiv:2503.19595)."""
    groups = _group_statistics(inputs)
    ranked_N = torch.where(inputs.valid_N, groups.scores_N, -torch.inf)
    by_score = torch.argsort(ranked_N, descending=True, stable=True)
    order = by_score[torch.argsort(groups.group_N[by_score], stable=True)]
    first_N = torch.ones_like(inputs.valid_N)
    first_N[1:] = groups.group_N[order][1:] != groups.group_N[order][:-1]
    second_N = torch.roll(ranked_N[order], -1)
    lead_N = torch.where(first_N & second_N.isfinite(), ranked_N[order] - second_N, 0.0)
    if settings.norm_adv_by_std_in_grpo:
        lead_N = lead_N / (groups.std_N[order] + _STD_EPSILON)
    lead_N = torch.where(groups.alone_N[order], 0.0, lead_N)
    return _outcome(torch.zeros_like(lead_N).index_copy(0, order, lead_N), inputs)


def rloo(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Subtract from each reward the mean of the group's other samples (arXiv:2402.14740)."""
    groups = _group_statistics(inputs)
    others_N = (groups.num_valid_N - 1).clamp(min=1)
    return _outcome((groups.scores_N - groups.mean_N) * groups.num_valid_N / others_N, inputs)


def opo(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Subtract from each reward the length-weighted mean of the group (arXiv:2505.23585)."""
    groups = _group_statistics(inputs)
    length_N = count_by_sequence(inputs.sequence_R, inputs.num_sequences) * inputs.valid_N
    total_N = groups.total(length_N.double()).clamp(min=1)
    baseline_N = groups.total(length_N * groups.scores_N) / total_N
    return _outcome(groups.scores_N - torch.where(groups.alone_N, 0.0, baseline_N), inputs)


def gpg(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Divide ``R - mean`` by the share of sequences whose reward is not 0 (arXiv:2504.02546)."""
    groups = _group_statistics(inputs)
    rewarded = torch.count_nonzero(groups.scores_N).clamp(min=1)
    scale = inputs.valid_N.sum() / rewarded
    return _outcome(scale * (groups.scores_N - groups.mean_N), inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Whiten ``R - mean`` of the group over the tokens of the batch (arXiv:2501.03262)."""
    groups = _group_statistics(inputs)
    whitened_R = _whiten(_broadcast(groups.scores_N - groups.mean_N, inputs), inputs)
    return Advantages(whitened_R, whitened_R)


def reinforce_plus_plus(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Whiten the discounted returns over the tokens of the batch (arXiv:2501.03262)."""
    returns_R = discounted_suffix_sum(
        _valid_rewards(inputs), inputs.sequence_R, discount=settings.gamma
    )
    return Advantages(_whiten(returns_R, inputs), returns_R)


def remax(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Subtract the reward of the greedy response from the return (arXiv:2310.10505).

    If the reward of the greedy response failed (NaN), the advantages of its group are 0.
    """
    assert inputs.greedy_scores_N is not None, "remax needs greedy_scores_N"
    returns_R = discounted_suffix_sum(_valid_rewards(inputs), inputs.sequence_R, discount=1.0)
    advantages_R = returns_R - inputs.greedy_scores_N[inputs.sequence_R]
    valid_N = inputs.valid_N & ~inputs.greedy_scores_N.isnan()
    return Advantages(torch.where(valid_N[inputs.sequence_R], advantages_R, 0.0), returns_R)


def gae(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Compute generalised advantages (arXiv:1506.02438) and returns; whiten the advantages.

    Given tokens (tool output) are not in the flat layout: the recursion passes over them. The
    return of a failed sequence is its value, so the critic learns nothing from it.
    """
    assert inputs.values_R is not None, "gae needs values_R"
    next_values_R = shift_from_next(inputs.values_R, inputs.sequence_R)
    error_R = _valid_rewards(inputs) + settings.gamma * next_values_R - inputs.values_R
    raw_R = discounted_suffix_sum(
        error_R, inputs.sequence_R, discount=settings.gamma * settings.lam
    )
    valid_R = inputs.valid_N[inputs.sequence_R]
    returns_R = torch.where(valid_R, raw_R, 0.0) + inputs.values_R
    return Advantages(_whiten(raw_R, inputs), returns_R)


def optimal_token_baseline(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Subtract from each return the baseline that minimizes the variance of the gradient
    (arXiv:2602.07078).

    The baseline of the t-th tokens of a group is the weighted mean of the returns from these tokens
    on. The weight of a response is the sum of ``1 - 2 p + sum of squared probabilities`` over its
    tokens up to the t-th, which estimates the squared norm of the gradient; with importance
    weights, each summand is multiplied by the square of its weight. A token has no baseline if no
    other response of its group is as long.
    """
    assert inputs.old_logp_R is not None and inputs.squares_R is not None, "it needs both"
    groups, sequence_R = _group_statistics(inputs), inputs.sequence_R
    returns_R = discounted_suffix_sum(_valid_rewards(inputs), sequence_R, discount=1.0)
    norm_R = 1 - 2 * inputs.old_logp_R.double().exp() + inputs.squares_R
    if inputs.weights_R is not None:
        norm_R = norm_R * inputs.weights_R.square()
    valid_R = inputs.valid_N[sequence_R]
    energy_R = torch.where(valid_R, _running_sum(norm_R, inputs), 0.0)
    group_R, place_R = groups.group_N[sequence_R], _running_sum(torch.ones_like(norm_R), inputs)
    # Tokens at the same place of the responses to one prompt are compared.
    cell_R = _numbered_from_zero(group_R * (len(group_R) + 1) + place_R.long())
    count_R, energies_R, weighted_R = (
        _group_total(x_R, cell_R) for x_R in (valid_R.double(), energy_R, energy_R * returns_R)
    )
    baseline_R = torch.where(count_R > 1, weighted_R / (energies_R + 1e-8), 0.0)
    is_compared_N = inputs.valid_N & (groups.alone_N | (groups.num_valid_N > 1))
    advantages_R = torch.where(is_compared_N[sequence_R], returns_R - baseline_R, 0.0)
    return Advantages(advantages_R.float(), returns_R)


def _running_sum(values_R: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Return the sum over a sequence's tokens up to each token, fp64 (R,)."""
    sums_R = values_R.cumsum(0)
    before_R = torch.nn.functional.pad(sums_R, (1, 0))[:-1]
    is_first_R = torch.ones_like(inputs.sequence_R, dtype=torch.bool)
    is_first_R[1:] = inputs.sequence_R[1:] != inputs.sequence_R[:-1]
    offset_N = values_R.new_zeros(inputs.num_sequences)
    offset_N[inputs.sequence_R[is_first_R]] = before_R[is_first_R]
    return sums_R - offset_N[inputs.sequence_R]


ADVANTAGES: Mapping[str, EstimatorFunction] = MappingProxyType(
    {
        "gae": gae,
        "gdpo": gdpo,
        "gpg": gpg,
        "grpo": grpo,
        "grpo_passk": grpo_passk,
        "grpo_vectorized": grpo,
        "opo": opo,
        "optimal_token_baseline": optimal_token_baseline,
        "reinforce_plus_plus": reinforce_plus_plus,
        "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
        "remax": remax,
        "rloo": rloo,
        "rloo_vectorized": rloo,
        "tir_optimal_token_baseline": optimal_token_baseline,
    }
)
"""The built-in values of ``algorithm.adv_estimator``. In verl, ``grpo_vectorized`` and
``rloo_vectorized`` are faster programs for ``grpo`` and ``rloo`` (the latter gives 0 to a group of
one), and ``tir_optimal_token_baseline`` leaves out given tokens, which the flat layout lacks.
"""


def estimate_advantages(inputs: AdvantageInputs, settings: AlgorithmConfig) -> Advantages:
    """Apply the estimator ``settings.adv_estimator``.

    Raises:
        UserError: a user's function cannot be imported, or does not return ``Advantages`` of two
            finite fp32 tensors (R,).
    """
    name = settings.adv_estimator
    if name in ADVANTAGES:
        return ADVANTAGES[name](inputs, settings)
    found = import_dotted("algorithm.adv_estimator", name)(inputs, settings)
    if not isinstance(found, Advantages):
        raise _not_advantages(name, f"returned {type(found).__name__}")
    expected = inputs.token_rewards_R
    for column in ("advantages_R", "returns_R"):
        values_R: Any = getattr(found, column)
        if not isinstance(values_R, Tensor):
            raise _not_advantages(name, f"returned {column} of type {type(values_R).__name__}")
        if values_R.shape != expected.shape or values_R.dtype != expected.dtype:
            raise _not_advantages(
                name, f"returned {column} of shape {tuple(values_R.shape)} and {values_R.dtype}"
            )
        if not values_R.isfinite().all():
            raise _not_advantages(name, f"returned {column} with a value that is not finite")
    return found


def _not_advantages(name: str, fault: str) -> UserError:
    return UserError(
        "algorithm.adv_estimator",
        name,
        rule=fault,
        remedy="Return tandem.algorithms.advantages.Advantages, fp32, with one finite number for "
        "each response token.",
    )
