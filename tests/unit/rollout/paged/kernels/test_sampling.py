# SPDX-License-Identifier: Apache-2.0
"""The drawing kernels against the sampler of CPUs: tokens, log-probs, and what becomes of a row."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.rollout.paged.cache import RowState, Window
from tandem.rollout.paged.kernels.sampling import CHUNK, KernelDraws, draw_next
from tandem.rollout.sampler import DrawRule, draw_tokens

EOS = (3, 7)
PLAIN = DrawRule(temperature=1.0, top_k=-1, top_p=1.0)
GREEDY = DrawRule(temperature=0.0, top_k=-1, top_p=1.0)
LARGEST = 1 - 2.0**-24
"""The largest uniform number there is."""
NAN, INFINITY = float("nan"), float("inf")


def _state(rules: Sequence[DrawRule], device: torch.device, *, remaining: int = 5) -> RowState:
    """Active rows at position 10 that have drawn nothing in this window and ignore no end token."""
    state = RowState.allocate(len(rules), device)
    state.numbers[:, RowState.POSITION] = 10
    state.numbers[:, RowState.REMAINING] = remaining
    state.numbers[:, RowState.ACTIVE] = 1
    state.numbers[:, RowState.TOP_K] = torch.tensor([max(0, r.top_k) for r in rules]).to(device)
    state.settings[:] = torch.tensor([(rule.temperature, rule.top_p) for rule in rules])
    return state


def _window(uniform_B: Tensor) -> Window:
    """Room for three tokens a row; the first draw looks at ``uniform_B``."""
    device = uniform_B.device
    window = Window.allocate(len(uniform_B), 3, eos_ids=EOS, device=device)
    window.uniform_BW[:, 0] = uniform_B
    return window


def _draw(
    logits_BV: Tensor, uniform_B: Tensor, *, rules: Sequence[DrawRule], filtered: bool = True
) -> tuple[Tensor, Tensor]:
    """Token and log-prob of one draw, each row from its own logits."""
    window, device = _window(uniform_B), logits_BV.device
    rows_B = torch.arange(len(rules), dtype=torch.int32, device=device)
    state = _state(rules, device)
    draw_next(logits_BV, state, window=window, filtered=filtered, logits_row_B=rows_B)
    return window.token_BW[:, 0], window.logp_BW[:, 0]


def _check(logits_BV: Tensor, uniform_B: Tensor, *, rules: Sequence[DrawRule]) -> Tensor:
    """Each row as the sampler of CPUs draws it; returns the tokens."""
    draw = KernelDraws()(logits_BV, uniform_B, rules=tuple(rules), forced={})
    token_B, logp_B = draw.token_B, draw.logp_B
    for row, rule in enumerate(rules):
        expected = draw_tokens(logits_BV[row : row + 1], uniform_B[row : row + 1], rule=rule)
        assert int(token_B[row]) == int(expected.token_B), (row, rule)
        torch.testing.assert_close(logp_B[row], expected.logp_B[0], rtol=1e-5, atol=1e-5)
    return token_B


def test_every_rule_in_one_batch(device: torch.device) -> None:
    rules = [
        PLAIN,
        DrawRule(0.3, -1, 1.0),
        DrawRule(2.0, -1, 1.0),
        GREEDY,
        DrawRule(1.0, 5, 1.0),
        DrawRule(1.0, -1, 0.6),
        DrawRule(0.8, 8, 0.7),
        DrawRule(1.0, 1000, 0.999),
        DrawRule(0.0, 4, 1.0),
    ]
    logits_BV = 3 * torch.randn(len(rules), 40, device=device)
    _check(logits_BV, torch.rand(len(rules), device=device), rules=rules)


@pytest.mark.parametrize("vocabulary", [1, 50, CHUNK, CHUNK + 1, 2 * CHUNK + 905])
def test_vocabularies_of_any_size(vocabulary: int, device: torch.device) -> None:
    rules = [PLAIN, DrawRule(0.5, -1, 1.0), GREEDY, PLAIN, PLAIN]
    uniform_B = torch.tensor([0.02, 0.5, 0.0, 0.97, LARGEST], device=device)
    token_B = _check(torch.randn(5, vocabulary, device=device), uniform_B, rules=rules)
    assert len(set(token_B.tolist())) > 3 or vocabulary == 1


def test_logits_of_a_padded_vocabulary_and_a_token_that_is_forced(device: torch.device) -> None:
    logits_BV = torch.randn(3, 64, device=device)[:, :50]
    uniform_B = torch.rand(3, device=device)
    _check(logits_BV, uniform_B, rules=[PLAIN, GREEDY, PLAIN])
    draw = KernelDraws()(logits_BV, uniform_B, rules=(GREEDY,) * 3, forced={1: 7})
    assert int(draw.token_B[1]) == 7
    expected = torch.log_softmax(logits_BV[1], -1)[7]
    torch.testing.assert_close(draw.logp_B[1], expected, rtol=1e-5, atol=1e-5)


def test_filters_across_chunks(device: torch.device) -> None:
    rules = [DrawRule(1.0, 300, 1.0), DrawRule(1.0, -1, 0.9)]
    logits_BV = torch.randn(2, 2 * CHUNK + 905, device=device)
    _check(logits_BV, torch.tensor([0.9, 0.999], device=device), rules=rules)


@pytest.mark.parametrize("allowed", [(0,), (2500,), (5, CHUNK, 2999), (2999,)])
def test_tokens_without_weight_are_never_drawn(
    allowed: tuple[int, ...], device: torch.device
) -> None:
    logits_V = torch.full((3000,), -INFINITY, device=device)
    logits_V[list(allowed)] = torch.randn(len(allowed), device=device)
    logits_V[1] = -200.0  # has weight in fp64 only
    uniform_B = torch.tensor([0.0, 1e-7, 0.5, 0.999, LARGEST], device=device)
    tokens_B, logp_B = _draw(
        logits_V.expand(5, -1).contiguous(), uniform_B, rules=[PLAIN] * 5, filtered=False
    )
    assert set(tokens_B.tolist()) <= set(allowed)
    assert (int(tokens_B[0]), int(tokens_B[-1])) == (allowed[0], allowed[-1])
    exact_V = torch.log_softmax(logits_V.double(), -1)
    torch.testing.assert_close(logp_B.double(), exact_V[tokens_B], rtol=0, atol=1e-6)


def test_what_a_filter_excludes_is_never_drawn(device: torch.device) -> None:
    logits_BV = torch.randn(1, 30, device=device).expand(3, -1).contiguous()
    kept = sorted(logits_BV[0].topk(3).indices.tolist())
    uniform_B = torch.tensor([0.0, 0.5, LARGEST], device=device)
    tokens_B, _ = _draw(logits_BV, uniform_B, rules=[DrawRule(2.0, 3, 1.0)] * 3)
    first, middle, last = tokens_B.tolist()
    assert (first, last) == (kept[0], kept[2])
    assert middle in kept


def test_tokens_that_tie_with_the_last_kept_stay(device: torch.device) -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 1.0, 1.0, -1.0]], device=device).repeat(3, 1)
    uniform_B = torch.tensor([0.1, 0.5, 0.9], device=device)
    tokens_B, _ = _draw(logits_BV, uniform_B, rules=[DrawRule(1.0, 2, 1.0)] * 3)
    assert tokens_B.tolist() == [1, 2, 3]


def test_ties_of_the_greatest_logit_are_the_first(device: torch.device) -> None:
    logits_BV = torch.zeros(1, CHUNK + 9, device=device)
    logits_BV[0, [70, 5, CHUNK + 2]] = 2.0
    tokens_B, _ = _draw(logits_BV, torch.zeros(1, device=device), rules=[GREEDY])
    assert tokens_B.tolist() == [5]


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("poison", [NAN, INFINITY])
def test_logits_that_are_not_finite_end_their_row_alone(
    poison: float, device: torch.device
) -> None:
    rules = [PLAIN, PLAIN, GREEDY, PLAIN]
    logits_BV = torch.randn(4, CHUNK + 50, device=device)
    logits_BV[:, list(EOS)] = -INFINITY
    logits_BV[1, 9] = poison
    logits_BV[2] = NAN
    window, state = _window(torch.full((4,), 0.4, device=device)), _state(rules, device)
    rows_B = torch.arange(4, dtype=torch.int32, device=device)
    draw_next(logits_BV, state, window=window, filtered=False, logits_row_B=rows_B)
    assert window.logp_BW[:, 0].isnan().tolist() == [False, True, True, False]
    assert state.numbers[:, RowState.ACTIVE].tolist() == [1, 0, 0, 1]
    tokens_B = window.token_BW[:, 0]
    assert bool(((tokens_B >= 0) & (tokens_B < CHUNK + 50)).all())
    for row in (0, 3):
        expected = draw_tokens(logits_BV[row : row + 1], torch.tensor([0.4]).to(device), rule=PLAIN)
        assert int(tokens_B[row]) == int(expected.token_B)


def test_what_becomes_of_a_row(device: torch.device) -> None:
    """Rows: goes on, ends by either end token, ignores them, draws its last token, is inactive."""
    tokens = [4, 3, 7, 7, 5, 6]
    logits_BV = torch.full((6, 9), -50.0, device=device)
    logits_BV[range(6), tokens] = 50.0
    state = _state([PLAIN] * 6, device)
    state.numbers[3, RowState.IGNORE_EOS] = 1
    state.numbers[4, RowState.REMAINING] = 1
    state.numbers[5, RowState.ACTIVE] = 0
    state.numbers[:, RowState.COUNT] = torch.tensor([0, 0, 1, 2, 1, 1], device=device)
    before = state.numbers.clone()
    window = _window(torch.full((6,), 0.5, device=device))
    window.uniform_BW[:] = 0.5
    rows_B = torch.arange(6, dtype=torch.int32, device=device)
    draw_next(logits_BV, state, window=window, filtered=False, logits_row_B=rows_B)
    assert window.token_BW.tolist() == [
        [4, 0, 0],
        [3, 0, 0],
        [0, 7, 0],
        [0, 0, 7],
        [0, 5, 0],
        [0, 0, 0],
    ]
    after = before.clone()
    after[:5, RowState.TOKEN] = torch.tensor(tokens[:5], device=device)
    after[:5, RowState.POSITION] += 1
    after[:5, RowState.REMAINING] -= 1
    after[:5, RowState.COUNT] += 1
    after[:, RowState.ACTIVE] = torch.tensor([1, 0, 0, 1, 0, 0], device=device)
    assert torch.equal(state.numbers, after)


def test_rows_draw_from_the_logits_they_name_with_the_number_of_their_count(
    device: torch.device,
) -> None:
    logits_LV = torch.randn(2, 60, device=device)
    uniform_BW = torch.tensor([[0.1, 0.9, 0.3], [0.9, 0.3, 0.1], [0.6, 0.7, 0.2]], device=device)
    state, window = _state([PLAIN] * 3, device), _window(uniform_BW[:, 0])
    window.uniform_BW[:] = uniform_BW
    counts = [1, 0, 2]
    state.numbers[:, RowState.COUNT] = torch.tensor(counts, device=device)
    sources = [1, 1, 0]
    rows_B = torch.tensor(sources, dtype=torch.int32, device=device)
    draw_next(logits_LV, state, window=window, filtered=False, logits_row_B=rows_B)
    for row, (source, count) in enumerate(zip(sources, counts, strict=True)):
        uniform_1 = uniform_BW[row, count : count + 1]
        expected = draw_tokens(logits_LV[source : source + 1], uniform_1, rule=PLAIN)
        assert int(window.token_BW[row, count]) == int(expected.token_B)
    assert int(window.token_BW[0, 1]) == int(window.token_BW[1, 0])


def test_draws_that_are_used_again_follow_other_rules(device: torch.device) -> None:
    draws, logits_BV = KernelDraws(), torch.randn(4, 300, device=device)
    uniform_B = torch.rand(4, device=device)
    for rules in ((PLAIN,) * 4, (GREEDY, PLAIN, GREEDY, DrawRule(0.5, 3, 0.9)), (PLAIN,) * 2):
        rows = len(rules)
        for _ in range(2):
            draw = draws(logits_BV[:rows], uniform_B[:rows], rules=rules, forced={})
            new = KernelDraws()(logits_BV[:rows], uniform_B[:rows], rules=rules, forced={})
            assert draw.token_B.tolist() == new.token_B.tolist()
            assert draw.logp_B.tolist() == new.logp_B.tolist()
