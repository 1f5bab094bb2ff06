# SPDX-License-Identifier: Apache-2.0
"""Requests for rollout engines of other packages, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.api import Rollout
from tandem.models.language_model import LanguageModel
from tandem.types import Completion, GenerationRequest, SamplingParams

RULES = (
    SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=24),
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=24),
)


def requests_of_all_rules() -> list[GenerationRequest]:
    """72 samples; some prompts are longer than a block of a cache."""
    prompts = [tuple(4 + (7 * i + j) % 90 for j in range(20 + 20 * (i % 3))) for i in range(6)]
    ids = iter(range(1000))
    return [
        GenerationRequest(tuple(next(ids) for _ in range(4)), prompt, rule)
        for rule in RULES
        for prompt in prompts
    ]


def generate(rollout: Rollout, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
    """The completions by sample id."""
    rollout.add(requests)
    finished: dict[int, Completion] = {}
    while completions := rollout.advance():
        finished |= {one.sample_id: one for one in completions}
    return finished


def change(model: LanguageModel, seed: int) -> None:
    """Every weight, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.module.parameters():
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
