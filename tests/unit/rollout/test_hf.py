# SPDX-License-Identifier: Apache-2.0
"""Rollout by transformers' generate against one-by-one generation with full forward passes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
import torch
import transformers

from tandem.rollout.hf import HfRolloutConfig, HfRolloutEngine
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams

EOS = (0, 1)
SEED = 3
CONFIG = HfRolloutConfig(seed=SEED, eos_ids=EOS, max_num_seqs=5)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, max_new_tokens=9)
GREEDY = replace(SAMPLED, temperature=0.0, max_new_tokens=4)
ENDLESS = replace(SAMPLED, ignore_eos=True, max_new_tokens=6)
REQUESTS = [
    GenerationRequest((0, 1, 2), (5, 6, 7), SAMPLED),
    GenerationRequest((3, 4), (9, 10, 11, 12, 13, 14), SAMPLED),
    GenerationRequest((5, 6), (3,), SAMPLED),
    GenerationRequest((7,), (5, 6, 7), GREEDY),
    GenerationRequest((8, 9, 10, 11, 12, 13), (8, 8), ENDLESS),
]


@pytest.fixture(scope="module")
def module() -> transformers.PreTrainedModel:
    """A family that our decoder does not compute, with generation defaults that change scores."""
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=32, n_embd=16, n_layer=2, n_head=2, initializer_range=0.4
    )
    torch.manual_seed(0)
    module = transformers.GPT2LMHeadModel(config)
    module.generation_config.repetition_penalty = 5.0
    module.generation_config.max_length = 7
    return module


@torch.no_grad()
def _one_by_one(module: torch.nn.Module, request: GenerationRequest, sample_id: int) -> Completion:
    ids, logps = list(request.prompt_ids), []
    module.eval()
    for position in range(request.sampling.max_new_tokens):
        logits = module(input_ids=torch.tensor([ids])).logits[:, -1]
        uniform = uniforms(stream_keys(SEED, [sample_id]), torch.tensor([[position]]))[0]
        draw = draw_tokens(logits, uniform, rule=DrawRule.of(request.sampling))
        ids, logps = [*ids, int(draw.token_B)], [*logps, float(draw.logp_B)]
        if ids[-1] in EOS and not request.sampling.ignore_eos:
            break
    stopped = ids[-1] in EOS and not request.sampling.ignore_eos
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    drawn = array("i", ids[len(request.prompt_ids) :])
    return Completion(sample_id, drawn, array("f", logps), reason, 2)


def test_batches_equal_one_by_one_generation(module: transformers.PreTrainedModel) -> None:
    module.train()
    engine = HfRolloutEngine(module, CONFIG)
    engine.set_weights_version(2)
    engine.add(REQUESTS)
    finished: list[Completion] = []
    while completions := engine.advance():
        finished += completions
    assert module.training and module.generation_config.repetition_penalty == 5.0
    expected = [_one_by_one(module, r, i) for r in REQUESTS for i in r.sample_ids]
    assert {c.finish_reason for c in expected} == {FinishReason.STOP, FinishReason.LENGTH}
    for actual, wanted in zip(finished, expected, strict=True):
        assert actual.log_probs == pytest.approx(wanted.log_probs, abs=1e-5)
        assert replace(actual, log_probs=wanted.log_probs) == wanted


def test_batches_hold_whole_requests_of_one_rule(module: transformers.PreTrainedModel) -> None:
    engine = HfRolloutEngine(module, CONFIG)
    engine.add(REQUESTS)
    sizes: list[int] = []
    while completions := engine.advance():
        sizes.append(len(completions))
    assert sizes == [5, 2, 1, 6]
