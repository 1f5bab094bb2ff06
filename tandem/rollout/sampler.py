# SPDX-License-Identifier: Apache-2.0
"""Sampling of one token per row from logits and a uniform number, by inverse transform.

The log-prob is that of the temperature-scaled distribution before top-k and top-p (greedy: the
unscaled one), which training differentiates. A row's token depends only on its own logits and
uniform number. There is no generator and no state.

Shapes: B rows, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.types import SamplingParams

_FIRST_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class DrawRule:
    """The sampling parameters of a draw. ``temperature == 0`` is greedy."""

    temperature: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> DrawRule:
        """Return the rule of a request."""
        return cls(sampling.temperature, sampling.top_k, sampling.top_p)


@dataclass(frozen=True, slots=True)
class Draw:
    """The drawn token ids, int64 (B,), and their log-probs, fp32 (B,)."""

    token_B: Tensor
    logp_B: Tensor


class DrawRows(Protocol):
    """A function that draws one token per row, each by its own rule; ``draw_rows`` is one.

    It may keep what it prepares for ``rules`` until it gets another tuple.
    """

    def __call__(
        self,
        logits_BV: Tensor,
        uniform_B: Tensor,
        *,
        rules: tuple[DrawRule, ...],
        forced: Mapping[int, int],
    ) -> Draw: ...


def draw_tokens(logits_BV: Tensor, uniform_B: Tensor, *, rule: DrawRule) -> Draw:
    """Draw one token per row. ``uniform_B`` is fp32 in [0, 1); a greedy draw ignores it."""
    logits_BV = logits_BV.float()
    if rule.temperature == 0:
        token_B1 = logits_BV.max(-1, keepdim=True).indices  # on CPUs faster than argmax
        prob_BV = torch.softmax(logits_BV, -1)
    else:
        scaled_BV = logits_BV if rule.temperature == 1 else logits_BV / rule.temperature
        prob_BV = torch.softmax(scaled_BV, -1)
        token_B1 = _invert(_filter(prob_BV, rule), uniform_B)
    return Draw(token_B1[:, 0], prob_BV.gather(1, token_B1).log_()[:, 0])


def draw_rows(
    logits_BV: Tensor,
    uniform_B: Tensor,
    *,
    rules: Sequence[DrawRule],
    forced: Mapping[int, int],
) -> Draw:
    """Draw one token per row, each by its own rule.

    Args:
        forced: row -> the token that is taken in place of a drawn one. Its log-prob is unscaled.
    """
    if len(set(rules)) == 1:
        draw = draw_tokens(logits_BV, uniform_B, rule=rules[0])
    else:
        draw = Draw(torch.zeros_like(uniform_B, dtype=torch.int64), torch.zeros_like(uniform_B))
        for rule in set(rules):
            index_C = torch.tensor([i for i, one in enumerate(rules) if one == rule])
            index_C = index_C.to(logits_BV.device)
            part = draw_tokens(logits_BV[index_C], uniform_B[index_C], rule=rule)
            draw.token_B[index_C], draw.logp_B[index_C] = part.token_B, part.logp_B
    force(draw, logits_BV, forced=forced)
    return draw


def force(draw: Draw, logits_BV: Tensor, *, forced: Mapping[int, int]) -> None:
    """Put other tokens in place of drawn ones, with their unscaled log-probs.

    Args:
        forced: row -> its token.
    """
    for row, token in forced.items():
        draw.token_B[row] = token
        draw.logp_B[row] = torch.log_softmax(logits_BV[row].float(), -1)[token]


def _invert(weight_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first token whose cumulated weight exceeds ``uniform`` of the total, (B, 1).

    Rounding cannot select a token of weight 0: a 24-bit uniform number below 1 times the total
    stays below the total, and a cumulated sum only rises where there is weight.
    """
    cumulated_BV = weight_BV.cumsum(-1)
    threshold_B1 = uniform_B[:, None] * cumulated_BV[:, -1:]
    # The clamp is for NaN logits, which must surface as a NaN log-prob and not as an index error.
    return torch.searchsorted(cumulated_BV, threshold_B1, right=True).clamp_max_(
        weight_BV.shape[1] - 1
    )


def _filter(prob_BV: Tensor, rule: DrawRule) -> Tensor:
    """Zero the tokens that top-k excludes, then those that top-p excludes of the remaining mass.

    Top-p keeps the shortest prefix, likeliest first, whose mass reaches ``top_p`` (Holtzman et al.,
    2020). The likeliest token always stays.
    """
    limits_k, limits_p = 0 < rule.top_k < prob_BV.shape[1], rule.top_p < 1
    if not limits_k and not limits_p:
        return prob_BV
    if limits_k:
        kept_BC, index_BC = prob_BV.topk(rule.top_k, dim=-1)
    else:
        kept_BC, index_BC = _nucleus_candidates(prob_BV, rule.top_p)
    if limits_p:
        mass_B1 = kept_BC.sum(-1, keepdim=True) if limits_k else 1.0
        outside_BC = kept_BC.cumsum(-1) - kept_BC >= rule.top_p * mass_B1
        outside_BC[:, 0] = False
        kept_BC = kept_BC.masked_fill(outside_BC, 0.0)
    return torch.zeros_like(prob_BV).scatter_(1, index_BC, kept_BC)


def _nucleus_candidates(prob_BV: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens in descending order, with at least ``top_p`` of a row's mass.

    Sorting the whole vocabulary costs more than a decode step of a small model. Its likeliest
    tokens nearly always suffice.
    """
    vocabulary = prob_BV.shape[1]
    kept_BC, index_BC = prob_BV.topk(min(_FIRST_CANDIDATES, vocabulary), dim=-1)
    if kept_BC.shape[1] < vocabulary and not bool((kept_BC.sum(-1) >= top_p).all()):
        kept_BC, index_BC = prob_BV.topk(vocabulary, dim=-1)
    return kept_BC, index_BC
