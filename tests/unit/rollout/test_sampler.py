# SPDX-License-Identifier: Apache-2.0
"""The sampler: distribution, supports of top-k and top-p, log-probs, greedy, edge cases."""

from __future__ import annotations

import pytest
import torch

from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import DrawRule, draw_tokens

PLAIN = DrawRule(temperature=1.0, top_k=-1, top_p=1.0)


def _draws(logits_V: torch.Tensor, rule: DrawRule, count: int = 20_000) -> torch.Tensor:
    """Counts (V,) of ``count`` keyed draws."""
    uniform_B = uniforms(stream_keys(3, [0]), torch.arange(count)[None])[0]
    draw = draw_tokens(logits_V.expand(count, -1), uniform_B, rule=rule)
    return torch.bincount(draw.token_B, minlength=len(logits_V))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits_V = torch.randn(60)
    counts = _draws(logits_V, DrawRule(temperature, -1, 1.0), count=200_000)
    expected = torch.softmax(logits_V / temperature, -1) * 200_000
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert 25 < chi_square < 110  # 59 degrees of freedom


def test_top_k_keeps_exactly_the_k_likeliest() -> None:
    logits_V = torch.randn(50)
    support = set(_draws(logits_V, DrawRule(1.5, 4, 1.0)).nonzero()[:, 0].tolist())
    assert support == set(logits_V.topk(4).indices.tolist())


def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass() -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    for top_p, expected in ((0.3, {1}), (0.5, {1, 3}), (0.7, {1, 3, 4}), (0.9, {1, 2, 3, 4})):
        counts = _draws(probabilities.log(), DrawRule(1.0, -1, top_p))
        assert set(counts.nonzero()[:, 0].tolist()) == expected


def test_top_p_applies_to_what_top_k_left() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    counts = _draws(probabilities.log(), DrawRule(1.0, 2, 0.55))
    assert set(counts.nonzero()[:, 0].tolist()) == {0}  # 0.4 / 0.7 already reaches 0.55


def test_top_p_of_a_flat_large_vocabulary_needs_more_than_the_first_candidates() -> None:
    logits_V = torch.linspace(0, 0.01, 3000)
    counts = _draws(logits_V, DrawRule(1.0, -1, 0.8), count=2000)
    excluded = 600 + 3  # the likeliest 80 percent are a little fewer than 2400 tokens
    assert int(counts[: excluded - 10].sum()) == 0
    assert int((counts[excluded:1976] > 0).sum()) > 400  # beyond the first 1024 candidates


def test_filters_renormalise_but_log_probs_do_not() -> None:
    logits_BV = torch.randn(1, 30).expand(5000, 30)
    uniform_B = uniforms(stream_keys(0, [1]), torch.arange(5000)[None])[0]
    draw = draw_tokens(logits_BV, uniform_B, rule=DrawRule(0.8, 5, 0.9))
    expected = torch.log_softmax(logits_BV / 0.8, -1).gather(1, draw.token_B[:, None])[:, 0]
    torch.testing.assert_close(draw.logp_B, expected, rtol=0, atol=1e-6)


def test_greedy_takes_the_maximum_at_temperature_one() -> None:
    logits_BV = torch.randn(8, 100) * 5
    draw = draw_tokens(logits_BV, torch.zeros(8), rule=DrawRule(0.0, 3, 0.5))
    assert torch.equal(draw.token_B, logits_BV.argmax(-1))
    expected = torch.log_softmax(logits_BV, -1).max(-1).values
    torch.testing.assert_close(draw.logp_B, expected, rtol=0, atol=1e-6)


def test_a_token_of_weight_zero_is_never_drawn() -> None:
    logits_V = torch.full((40,), float("-inf"))
    logits_V[[3, 17, 39]] = 0.0
    edges_B = torch.tensor([0.0, 1 / 3, 2 / 3, 1 - 2**-24])
    draw = draw_tokens(logits_V.expand(4, -1), edges_B, rule=PLAIN)
    assert set(draw.token_B.tolist()) <= {3, 17, 39}
    last_masked = logits_V.clone()
    last_masked[39] = float("-inf")
    draw = draw_tokens(last_masked.expand(4, -1), edges_B, rule=PLAIN)
    assert set(draw.token_B.tolist()) <= {3, 17}


def test_rows_do_not_see_each_other() -> None:
    logits_BV, uniform_B = torch.randn(64, 200), torch.rand(64)
    rule = DrawRule(0.9, 20, 0.95)
    together = draw_tokens(logits_BV, uniform_B, rule=rule)
    order = torch.randperm(64)
    shuffled = draw_tokens(logits_BV[order], uniform_B[order], rule=rule)
    assert torch.equal(together.token_B[order], shuffled.token_B)


def test_nan_logits_give_a_nan_log_prob_and_no_index_error() -> None:
    draw = draw_tokens(torch.full((2, 10), float("nan")), torch.tensor([0.0, 0.9]), rule=PLAIN)
    assert draw.logp_B.isnan().all()
