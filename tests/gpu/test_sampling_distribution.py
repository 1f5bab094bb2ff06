# SPDX-License-Identifier: Apache-2.0
"""Drawn tokens against the exact distribution, by chi-square: first tokens, which the prefill pass
draws for all samples of a prompt from one row of logits, and second ones, which captured steps do.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.types import GenerationRequest, SamplingParams
from tests.gpu.machine import SAMPLED, Machine, Shape, drain, make_engine, make_pair, open_ours

PROMPT = (5, 17, 3, 60, 42)
RULES = {
    "plain": replace(SAMPLED, temperature=1.0),
    "cold": replace(SAMPLED, temperature=0.5),
    "hot": replace(SAMPLED, temperature=1.7),
    "top_k": replace(SAMPLED, top_k=20),
    "top_p": replace(SAMPLED, top_p=0.6),
    "both": replace(SAMPLED, top_k=300, top_p=0.4, temperature=1.2),
}
FEWEST_EXPECTED = 10
"""Tokens that are expected more rarely are counted with others."""
COARSE_BINS = 40
"""Few bins by probability see a wrong temperature, many see a wrong token."""
NORMAL_QUANTILE = 4.75
"""A correct sampler exceeds the bound once in a million times."""


@torch.no_grad()
def exact(model: PreTrainedModel, ids: tuple[int, ...], *, sampling: SamplingParams) -> Tensor:
    """fp64 (V,): what the next token is drawn from, by definition."""
    ids_1T = torch.tensor([ids], device=model.device)
    logits_V = model(input_ids=ids_1T, use_cache=False).logits[0, -1].double().cpu()
    prob_V = (logits_V / sampling.temperature).softmax(-1)
    order_V = prob_V.argsort(descending=True)
    sorted_V = prob_V[order_V]
    if sampling.top_k > 0:
        sorted_V[sampling.top_k :] = 0
    before_V = sorted_V.cumsum(-1) - sorted_V
    sorted_V[before_V >= sampling.top_p * sorted_V.sum()] = 0
    kept_V = torch.zeros_like(prob_V)
    kept_V[order_V] = sorted_V
    return kept_V / kept_V.sum()


def bins_of(expected_V: Tensor, fewest: float) -> list[list[int]]:
    """Tokens that can be drawn, likeliest first, together where one alone is too rare."""
    bins: list[list[int]] = []
    held = fewest
    for token in expected_V.argsort(descending=True).tolist():
        if float(expected_V[token]) == 0:
            break
        if held >= fewest:
            bins.append([])
            held = 0.0
        bins[-1].append(token)
        held += float(expected_V[token])
    if held < fewest and len(bins) > 1:
        rest = bins.pop()
        bins[-1] += rest
    return bins


def check_distribution(drawn: list[int], prob_V: Tensor) -> None:
    """Pearson's statistic against its quantile (Wilson and Hilferty, 1931)."""
    counts = Counter(drawn)
    assert all(float(prob_V[token]) > 0 for token in counts), "an excluded token was drawn"
    expected_V = prob_V * len(drawn)
    for fewest in (FEWEST_EXPECTED, max(FEWEST_EXPECTED, len(drawn) / COARSE_BINS)):
        statistic, bins = 0.0, bins_of(expected_V, fewest)
        for tokens in bins:
            expected = float(expected_V[tokens].sum())
            statistic += (sum(counts[token] for token in tokens) - expected) ** 2 / expected
        freedom = max(1, len(bins) - 1)
        spread = 2 / (9 * freedom)
        bound = freedom * (1 - spread + NORMAL_QUANTILE * spread**0.5) ** 3
        assert statistic < bound, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_distributed_as_defined(name: str, machine: Machine, tmp_path: Path) -> None:
    if machine.trial and name not in ("hot", "both"):
        pytest.skip("filters of many rows take long in a trial")
    shape = Shape("qwen2", 64, 1, 4, vocabulary=5003)
    pair = make_pair(shape, machine, tmp_path)
    decoder = open_ours(tmp_path, machine, dtype=torch.float32).decoder
    assert decoder is not None
    num_samples = 40 if machine.trial else 20_000
    sampling = replace(RULES[name], max_new_tokens=1)
    engine = make_engine(decoder, machine, rows=num_samples, num_pages=num_samples + 8)
    engine.add([GenerationRequest(tuple(range(num_samples)), PROMPT, sampling)])
    drawn = [completion.token_ids[0] for completion in drain(engine).values()]
    assert len(drawn) == num_samples
    check_distribution(drawn, exact(pair.theirs, PROMPT, sampling=sampling))


def test_second_tokens_are_distributed_as_the_first_ones_say(
    machine: Machine, tmp_path: Path
) -> None:
    pair = make_pair(Shape("llama", 64, 1, 4, vocabulary=700), machine, tmp_path)
    decoder = open_ours(tmp_path, machine, dtype=torch.float32).decoder
    assert decoder is not None
    num_samples = 8 if machine.trial else 20_000
    sampling = replace(SAMPLED, top_k=3, max_new_tokens=2)
    engine = make_engine(decoder, machine, rows=num_samples, num_pages=num_samples + 8)
    engine.add([GenerationRequest(tuple(range(num_samples)), PROMPT, sampling)])
    drawn = [completion.token_ids for completion in drain(engine).values()]
    check_distribution([first for first, _ in drawn], exact(pair.theirs, PROMPT, sampling=sampling))
    for token in {first for first, _ in drawn}:
        followers = [second for first, second in drawn if first == token]
        prob_V = exact(pair.theirs, (*PROMPT, token), sampling=sampling)
        check_distribution(followers, prob_V)
