# SPDX-License-Identifier: Apache-2.0
"""Native generation of a model with experts equals transformers', alone and in a batch (MO6)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.types import GenerationRequest, SamplingParams
from tests.fakes.draining import drain_by_sample
from tests.unit.models.tiny_models import EXPERTS, open_fp32, write_hf, write_xdg

PROMPTS = ((3, 5, 7), (11,), (20, 21, 22, 23, 24, 25))
NUM_TOKENS = 12
GREEDY = SamplingParams(1.0, 1.0, -1, max_new_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG = NativeRolloutConfig(
    seed=1, eos_ids=(0,), max_num_seqs=8, max_num_batched_tokens=64, max_cache_bytes=1 << 24
)


def generated(decoder, *, max_num_seqs, temperature):
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=max_num_seqs))
    sampling = replace(GREEDY, temperature=temperature)
    engine.add([GenerationRequest((i,), ids, sampling) for i, ids in enumerate(PROMPTS)])
    return drain_by_sample(engine)


@pytest.mark.parametrize(
    "case",
    [
        *("qwen3_moe", "qwen2_moe", "mixtral", "dots1", "glm4_moe", "olmoe"),
        *("deepseek_v2_groups", "deepseek_v3", "XdgMoE"),
    ],
)
def test_mo6_greedy_tokens_and_log_probs_are_those_of_transformers(case, tmp_path):
    """See ``tests/unit/models/test_experts.py`` for the rounding of weights of this deviation."""
    write = write_xdg if case == "XdgMoE" else partial(write_hf, EXPERTS.get(case, dict)())
    theirs, decoder = write(tmp_path, std=0.1), open_fp32(tmp_path).decoder
    found = generated(decoder, max_num_seqs=8, temperature=0.0)
    for index, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        wanted = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        tokens = wanted[0, len(prompt) :]
        assert list(found[index].token_ids) == tokens.tolist()
        with torch.no_grad():
            logits_TV = theirs(wanted).logits[0, len(prompt) - 1 : -1]
        log_probs_T = logits_TV.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        assert found[index].log_probs == pytest.approx(log_probs_T.tolist(), abs=1e-5)


def test_mo6_a_batch_changes_nothing(tmp_path):
    write_hf(EXPERTS["qwen3_moe"](), tmp_path)
    decoder = open_fp32(tmp_path).decoder
    alone, together = (generated(decoder, max_num_seqs=n, temperature=1.0) for n in (1, 8))
    for index, one in alone.items():
        assert one.token_ids == together[index].token_ids
        assert one.log_probs == pytest.approx(together[index].log_probs, abs=1e-5)
