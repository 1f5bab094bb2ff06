# SPDX-License-Identifier: Apache-2.0
"""Rollout by transformers' ``generate``, for families that our decoder does not compute.

Requests are generated in batches, left-padded, without continuous batching and without sharing the
prefill. Tokens are drawn by a logits processor with the same keyed sampler as the native engine's,
and generate's own processors are kept out, so that log-probs are those of the model.

Shapes: B rows, M prompt columns, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams, TokenIds


@dataclass(frozen=True, slots=True)
class HfRolloutConfig:
    """How to run the engine: the fields mean what they mean for the native one."""

    seed: int
    eos_ids: tuple[int, ...]
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class _Sample:
    sample_id: int
    prompt_ids: TokenIds


class HfRolloutEngine:
    """``api.RolloutEngine`` over a transformers model, which is read, never copied."""

    def __init__(self, module: PreTrainedModel, config: HfRolloutConfig) -> None:
        self._module = module
        self._config = config
        self._waiting: deque[GenerationRequest] = deque()
        self._weights_version = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed."""
        self._waiting.extend(requests)

    def set_weights_version(self, version: int) -> None:
        """Batches generated from now on carry ``version``."""
        self._weights_version = version

    def advance(self) -> list[Completion]:
        """Generate the next batch to its end; [] only if there is no work."""
        if not self._waiting:
            return []
        sampling = self._waiting[0].sampling
        samples = self._next_samples(sampling)
        draws = _KeyedDraws(self._config.seed, samples, sampling, device=self._module.device)
        self._generate(samples, sampling, draws)
        pairs = zip(samples, draws.token_ids(), draws.log_probs(), strict=True)
        return [self._completion(*pair, sampling=sampling) for pair in pairs]

    def _next_samples(self, sampling: SamplingParams) -> list[_Sample]:
        """Whole requests of one sampling rule, as many as fit; at least one."""
        samples: list[_Sample] = []
        while self._waiting and self._waiting[0].sampling == sampling:
            request = self._waiting[0]
            if samples and len(samples) + len(request.sample_ids) > self._config.max_num_seqs:
                break
            samples += [_Sample(sample_id, request.prompt_ids) for sample_id in request.sample_ids]
            self._waiting.popleft()
        return samples

    @torch.inference_mode()
    def _generate(
        self, samples: list[_Sample], sampling: SamplingParams, draws: _KeyedDraws
    ) -> None:
        width = max(len(sample.prompt_ids) for sample in samples)
        padding = [width - len(sample.prompt_ids) for sample in samples]
        rows = [[0] * p + list(s.prompt_ids) for s, p in zip(samples, padding, strict=True)]
        input_BM = torch.tensor(rows, device=self._module.device)
        padding_B1 = torch.tensor(padding, device=input_BM.device)[:, None]
        mask_BM = torch.arange(width, device=input_BM.device) >= padding_B1
        config = GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=False,
            eos_token_id=None if sampling.ignore_eos else list(self._config.eos_ids),
            pad_token_id=0,
        )
        generate: Any = self._module.generate
        with _bare(self._module):
            generate(
                input_BM,
                attention_mask=mask_BM.long(),
                generation_config=config,
                logits_processor=LogitsProcessorList([draws]),
            )

    def _completion(
        self,
        sample: _Sample,
        token_ids: list[int],
        log_probs: list[float],
        *,
        sampling: SamplingParams,
    ) -> Completion:
        """Cut at the first end token: generate goes on until all rows of the batch have ended."""
        eos_ids = () if sampling.ignore_eos else self._config.eos_ids
        ends = [i for i, token in enumerate(token_ids) if token in eos_ids]
        length = ends[0] + 1 if ends else len(token_ids)
        return Completion(
            sample_id=sample.sample_id,
            token_ids=tuple(token_ids[:length]),
            log_probs=tuple(log_probs[:length]),
            finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
            weights_version=self._weights_version,
        )


class _KeyedDraws(LogitsProcessor):
    """Draws one token a row and step, keeps it with its log-prob, and lets greedy search take it."""

    def __init__(
        self, seed: int, samples: list[_Sample], sampling: SamplingParams, *, device: torch.device
    ) -> None:
        keys_B = stream_keys(seed, [sample.sample_id for sample in samples], device)
        positions_J = torch.arange(sampling.max_new_tokens, device=device)
        self._uniform_BJ = uniforms(keys_B, positions_J.expand(len(samples), -1))
        self._rule = DrawRule.of(sampling)
        self._tokens: list[Tensor] = []
        self._logps: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Minus infinity everywhere but at the drawn token."""
        draw = draw_tokens(scores, self._uniform_BJ[:, len(self._tokens)], self._rule)
        self._tokens.append(draw.token_B)
        self._logps.append(draw.logp_B)
        chosen_B1 = draw.token_B[:, None]
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B1, 0.0)

    def token_ids(self) -> list[list[int]]:
        """Tokens of each row, also beyond its end."""
        return torch.stack(self._tokens, 1).tolist()

    def log_probs(self) -> list[list[float]]:
        """Their log-probs."""
        return torch.stack(self._logps, 1).tolist()


@contextmanager
def _bare(module: PreTrainedModel) -> Iterator[None]:
    """Without the model's generation defaults, which change scores, and in evaluation mode."""
    defaults, training = module.generation_config, module.training
    module.generation_config = GenerationConfig()
    module.eval()
    try:
        yield
    finally:
        module.generation_config = defaults
        module.train(training)
