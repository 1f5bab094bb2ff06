# SPDX-License-Identifier: Apache-2.0
"""What a token is by definition: drawn from a full forward pass over all that is before it, under
the weights of its version. Nothing is cached, batched or shared. Where caches are kept, keys and
values are those of the version under which their token was fed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.api import RolloutEngine
from tandem.models.attention import PackedAttention
from tandem.models.decoder import Attention, Decoder
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


def drain_under_versions(
    engine: RolloutEngine, decoder: Decoder, *, count: int, max_steps: int
) -> list[Completion]:
    """Change the weights every ``max_steps`` steps until ``count`` completions have come."""
    finished: list[Completion] = []
    for version in itertools.count():
        with weights_of(decoder, version):
            engine.set_weights_version(version)
            finished += engine.advance(max_steps=max_steps)
            engine.settle()
        if len(finished) == count:
            break
    return finished


class _Cached:
    """Attention to what was fed in earlier passes, whatever weights that was with, and in this."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        if layer in self._states:
            k_before, v_before = self._states[layer]
            k_TKE, v_TKE = torch.cat((k_before, k_TKE)), torch.cat((v_before, v_TKE))
        self._states[layer] = k_TKE, v_TKE
        repeats = q_THE.shape[1] // k_TKE.shape[1]
        k, v = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k_TKE, v_TKE))
        num_before = len(k_TKE) - len(q_THE)
        seen = torch.ones(len(q_THE), len(k_TKE), dtype=torch.bool, device=k.device)
        o = F.scaled_dot_product_attention(q_THE.transpose(0, 1), k, v, seen.tril(num_before))
        return o.transpose(0, 1)


@torch.no_grad()
def _logits(decoder: Decoder, ids: Sequence[int], *, first: int, attention: Attention) -> Tensor:
    """What follows each token of ``ids``, which stand at positions from ``first`` on."""
    device = decoder.lm_head_weight.device
    position_T = torch.arange(first, first + len(ids), device=device)
    h_TD = decoder(torch.tensor(ids, device=device), position_T, attention)
    return F.linear(h_TD, decoder.lm_head_weight)


def _logits_by_version(
    decoder: Decoder, prompt: Sequence[int], completion: Completion, *, keeps_cache: bool
) -> Tensor:
    """What each token of a completion was drawn from."""
    none = torch.zeros(1, dtype=torch.int64)
    tokens, device = list(completion.token_ids), decoder.lm_head_weight.device
    fed = [*prompt, *tokens[:-1]]
    length = torch.tensor([len(fed)])
    cached, runs, begin = _Cached(), list[Tensor](), 0
    for version, count in completion.version_runs:
        end = (begin or len(prompt) - 1) + count
        with weights_of(decoder, version):
            if keeps_cache:
                logits = _logits(decoder, fed[begin:end], first=begin, attention=cached)
            else:
                attention = PackedAttention(Segments(none, length, none, none), device)
                logits = _logits(decoder, fed, first=0, attention=attention)[:end]
        runs.append(logits[-count:])
        begin = end
    return torch.cat(runs)


def _draws(logits: Tensor, request: GenerationRequest, *, sample_id: int, seed: int) -> Draw:
    """What is drawn from them, token by token."""
    keys = stream_keys(seed, [sample_id], device=logits.device)
    uniform = uniforms(keys, torch.arange(len(logits), device=logits.device)[None])[0]
    return draw_tokens(logits, uniform, rule=DrawRule.of(request.sampling))


def assert_drawn(
    decoder: Decoder,
    requests: Sequence[GenerationRequest],
    finished: Sequence[Completion],
    *,
    seed: int,
    keeps_cache: bool = False,
) -> None:
    """All samples are there, and each token is what its version draws; log-probs within 2e-5."""
    request_of = {i: request for request in requests for i in request.sample_ids}
    assert sorted(completion.sample_id for completion in finished) == sorted(request_of)
    for completion in finished:
        request, sample_id = request_of[completion.sample_id], completion.sample_id
        logits = _logits_by_version(
            decoder, request.prompt_ids, completion, keeps_cache=keeps_cache
        )
        draw = _draws(logits, request, sample_id=sample_id, seed=seed)
        assert list(completion.token_ids) == draw.token_B.tolist(), sample_id
        assert list(completion.log_probs) == pytest.approx(draw.logp_B.tolist(), abs=2e-5)
