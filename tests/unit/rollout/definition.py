# SPDX-License-Identifier: Apache-2.0
"""What a token is by definition: drawn from a full forward pass over all that is before it, under
the weights of its version. Nothing is cached, batched or shared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import Draw, DrawRule, draw_tokens
from tandem.types import Completion, GenerationRequest, Segments

_FACTORS = (1.0, -1.0, 0.7)


@contextmanager
def weights_of(decoder: Decoder, version: int) -> Iterator[None]:
    """Version 0 is the decoder as it is; the matrices of the layers are multiples of it."""
    changed = [p for name, p in decoder.named_parameters() if "layers" in name and p.dim() > 1]
    saved = [parameter.detach().clone() for parameter in changed]
    with torch.no_grad():
        for parameter in changed:
            parameter.mul_(_FACTORS[version % len(_FACTORS)])
    yield
    with torch.no_grad():
        for parameter, before in zip(changed, saved, strict=True):
            parameter.copy_(before)


@torch.no_grad()
def _draws(
    decoder: Decoder,
    request: GenerationRequest,
    *,
    sample_id: int,
    tokens: Sequence[int],
    seed: int,
) -> Draw:
    """What would be drawn in place of each token, given those before it."""
    device = decoder.lm_head_weight.device
    prompt = request.prompt_ids
    ids_T = torch.tensor((*prompt, *tokens[:-1]), device=device)
    none = torch.zeros(1, dtype=torch.int64)
    attention = PackedAttention(Segments(none, torch.tensor([len(ids_T)]), none, none), device)
    h_TD = decoder(ids_T, torch.arange(len(ids_T), device=device), attention)
    logits = F.linear(h_TD[len(prompt) - 1 :], decoder.lm_head_weight)
    keys = stream_keys(seed, [sample_id], device=device)
    uniform = uniforms(keys, torch.arange(len(tokens), device=device)[None])[0]
    return draw_tokens(logits, uniform, rule=DrawRule.of(request.sampling))


def assert_drawn(
    decoder: Decoder,
    requests: Sequence[GenerationRequest],
    finished: Sequence[Completion],
    *,
    seed: int,
) -> None:
    """All samples are there, and each token is what its version draws; log-probs within 2e-5."""
    request_of = {i: request for request in requests for i in request.sample_ids}
    assert sorted(completion.sample_id for completion in finished) == sorted(request_of)
    for completion in finished:
        index, tokens = 0, list(completion.token_ids)
        request, sample_id = request_of[completion.sample_id], completion.sample_id
        for version, count in completion.version_runs:
            run = slice(index, index + count)
            with weights_of(decoder, version):
                draw = _draws(decoder, request, sample_id=sample_id, tokens=tokens, seed=seed)
            assert tokens[run] == draw.token_B[run].tolist(), (sample_id, version)
            expected = draw.logp_B[run].tolist()
            assert list(completion.log_probs[run]) == pytest.approx(expected, abs=2e-5)
            index += count
