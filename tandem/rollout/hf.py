# SPDX-License-Identifier: Apache-2.0
"""Rollout by transformers' ``generate``, for families that our decoder does not compute.

Requests are generated in batches, left-padded, without continuous batching and without sharing the
prefill. Tokens are drawn by a logits processor with the same keyed sampler as the native engine's,
and generate's own processors are kept out, so that log-probs are those of the model.

Shapes: B rows, J new tokens, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tandem.rollout.ending import finish_reason
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.sampler import Draw, DrawRule, draw_tokens
from tandem.types import Completion, GenerationRequest, SamplingParams, TokenIds


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

    def __init__(self, module: nn.Module, config: HfRolloutConfig) -> None:
        """``module`` is a ``PreTrainedModel`` with a language-model head."""
        self._module: Any = module
        self._config = config
        self._waiting: deque[GenerationRequest] = deque()
        self._weights_version = 0

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed."""
        self._waiting.extend(requests)

    def settle(self) -> None:
        """See ``api.RolloutEngine``. Between two advances nothing is being computed."""

    def release_cache(self) -> bool:
        """See ``api.RolloutEngine``. Every batch has a cache of its own."""
        return not self._waiting

    def set_weights_version(self, version: int) -> bool:
        """Batches generated from now on carry ``version``; between two advances none is begun."""
        self._weights_version = version
        return True

    @torch.no_grad()
    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate the next batch to its end, whatever ``max_steps``; [] only without work."""
        if not self._waiting:
            return []
        sampling = self._waiting[0].sampling
        samples = self._next_samples(sampling)
        draws = self._generate(samples, sampling)
        token_ids = torch.stack([draw.token_B for draw in draws], 1).tolist()
        log_probs = torch.stack([draw.logp_B for draw in draws], 1).tolist()
        eos_ids = () if sampling.ignore_eos else self._config.eos_ids
        return [
            self._completion(sample, ids, log_probs=logps, eos_ids=eos_ids)
            for sample, ids, logps in zip(samples, token_ids, log_probs, strict=True)
        ]

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

    def _generate(self, samples: list[_Sample], sampling: SamplingParams) -> list[Draw]:
        """One draw a step until every row has ended."""
        device = self._module.device
        width = max(len(sample.prompt_ids) for sample in samples)
        padding = [width - len(sample.prompt_ids) for sample in samples]
        rows = [[0] * p + list(s.prompt_ids) for s, p in zip(samples, padding, strict=True)]
        mask = [[0] * p + [1] * (width - p) for p in padding]
        draws = _KeyedDraws(self._config.seed, samples, sampling=sampling, device=device)
        with _undisturbed(self._module):
            self._module.generate(
                torch.tensor(rows, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=sampling.max_new_tokens,
                    do_sample=False,
                    eos_token_id=None if sampling.ignore_eos else list(self._config.eos_ids),
                    pad_token_id=0,
                ),
                logits_processor=transformers.LogitsProcessorList([draws]),
            )
        return draws.done

    def _completion(
        self,
        sample: _Sample,
        token_ids: list[int],
        *,
        log_probs: list[float],
        eos_ids: tuple[int, ...],
    ) -> Completion:
        """Up to and with the first end token: a row goes on until its whole batch has ended."""
        ends = (i + 1 for i, token in enumerate(token_ids) if token in eos_ids)
        length = next(ends, len(token_ids))
        stopped = token_ids[length - 1] in eos_ids
        return Completion(
            sample_id=sample.sample_id,
            token_ids=array("i", token_ids[:length]),
            log_probs=array("f", log_probs[:length]),
            finish_reason=finish_reason(log_probs[length - 1], stopped=stopped),
            weights_version=self._weights_version,
        )


class _KeyedDraws:
    """A logits processor that draws and keeps one token a row and lets greedy search take it."""

    def __init__(
        self,
        seed: int,
        samples: list[_Sample],
        *,
        sampling: SamplingParams,
        device: torch.device,
    ) -> None:
        keys_B = stream_keys(seed, [sample.sample_id for sample in samples], device=device)
        positions_J = torch.arange(sampling.max_new_tokens, device=device)
        self._uniform_BJ = uniforms(keys_B, positions_J.expand(len(samples), -1))
        self._rule = DrawRule.of(sampling)
        self.done: list[Draw] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Minus infinity everywhere but at the drawn token, (B, V)."""
        draw = draw_tokens(scores, self._uniform_BJ[:, len(self.done)], rule=self._rule)
        self.done.append(draw)
        return torch.full_like(scores, float("-inf")).scatter_(1, draw.token_B[:, None], 0.0)


@contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Without the model's generation defaults, which change scores, and in evaluation mode."""
    defaults, training = module.generation_config, module.training
    module.generation_config = transformers.GenerationConfig()
    module.eval()
    try:
        yield
    finally:
        module.generation_config = defaults
        module.train(training)
