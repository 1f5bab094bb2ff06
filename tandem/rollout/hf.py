# SPDX-License-Identifier: Apache-2.0
"""Rollout by transformers' ``generate``, for any family that transformers knows.

Requests are generated in left-padded batches, without continuous batching or a shared prefill. A
logits processor draws the tokens with the keyed sampler of the native engines. No other processor
runs: log-probs are the model's.

Shapes: B rows, J new tokens, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tandem.api import Capacity, EngineFacts, EngineFailure
from tandem.models.hf import load_transformers
from tandem.rollout.completion import complete
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.resting import Resting
from tandem.rollout.sampler import Draw, DrawRule, draw_tokens
from tandem.types import Completion, GenerationRequest, SamplingParams, SliceSpec, TokenIds


@dataclass(frozen=True, slots=True)
class HfRolloutConfig:
    """The settings of the engine, as in ``NativeRolloutConfig``."""

    seed: int
    eos_ids: tuple[int, ...]
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class _Sample:
    sample_id: int
    prompt_ids: TokenIds
    first_index: int


class ModuleSink:
    """An ``api.WeightSink`` that copies tensors into a module whose names are those of files."""

    def __init__(self, module: nn.Module) -> None:
        self._weights = {name: weight.detach() for name, weight in module.named_parameters()}
        self._missing: set[str] = set()

    def manifest(self) -> Sequence[SliceSpec]:
        """Return the parameters of the module."""
        return [
            SliceSpec(name, own.dtype, tuple(own.shape), (0,) * own.ndim, tuple(own.shape))
            for name, own in self._weights.items()
        ]

    def begin(self, version: int) -> None:
        """Begin to take a version."""
        self._missing = set(self._weights)

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy one tensor."""
        self._weights[name].copy_(tensor)
        self._missing.discard(name)

    def end(self) -> None:
        """Raise EngineFailure if a tensor is missing."""
        if self._missing:
            raise EngineFailure(f"transformers: weights are missing: {sorted(self._missing)[:3]}")


class HfRolloutEngine(Resting):
    """An ``api.RolloutEngine`` over a ``PreTrainedModel``."""

    capacity = Capacity(num_rows=None, cache_tokens=None)

    def __init__(
        self, module: nn.Module, config: HfRolloutConfig, *, sink: ModuleSink | None = None
    ) -> None:
        """Generate with ``module``, which is the trainer's unless new weights come by ``sink``."""
        self._module: Any = module
        self._config = config
        self._sink = sink
        self._waiting: deque[GenerationRequest] = deque()
        self._weights_version = 0
        self._num_prefilled_tokens = self._num_decoded_tokens = 0

    @property
    def facts(self) -> EngineFacts:
        """The promises of the engine."""
        return EngineFacts(
            shares_weights=self._sink is None, draws_by_key=True, stops_within_sequences=False
        )

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests; nothing is computed."""
        self._waiting.extend(requests)

    def sleep(self) -> bool:
        """Return whether nothing waits. No memory is held between two batches."""
        return not self._waiting

    def sink(self) -> ModuleSink | None:
        """Return where new weights go; None if those of the module change in place."""
        return self._sink

    def set_weights_version(self, version: int) -> bool:
        """Tag the batches generated from now on with ``version``."""
        self._weights_version = version
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return how many tokens were prefilled and decoded, without padding."""
        return {
            "num_prefilled_tokens": self._num_prefilled_tokens,
            "num_decoded_tokens": self._num_decoded_tokens,
        }

    @torch.no_grad()
    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate the next batch to its end. ``max_steps`` is ignored."""
        if not self._waiting:
            return []
        sampling = self._waiting[0].sampling
        samples = self._next_samples(sampling)
        draws = self._generate(samples, sampling)
        token_ids = torch.stack([draw.token_B for draw in draws], 1).tolist()
        log_probs = torch.stack([draw.logp_B for draw in draws], 1).tolist()
        eos_ids = () if sampling.ignore_eos else self._config.eos_ids
        completions = [
            self._completion(sample, ids, log_probs=logps, eos_ids=eos_ids)
            for sample, ids, logps in zip(samples, token_ids, log_probs, strict=True)
        ]
        self._num_prefilled_tokens += sum(len(sample.prompt_ids) for sample in samples)
        self._num_decoded_tokens += sum(len(one.token_ids) for one in completions)
        return completions

    def _next_samples(self, sampling: SamplingParams) -> list[_Sample]:
        """Take at least one whole request, and as many more with the same sampling as fit."""
        samples: list[_Sample] = []
        while self._waiting and self._waiting[0].sampling == sampling:
            request = self._waiting[0]
            if samples and len(samples) + len(request.sample_ids) > self._config.max_num_seqs:
                break
            samples += [
                _Sample(sample_id, request.prompt_ids, request.first_index)
                for sample_id in request.sample_ids
            ]
            self._waiting.popleft()
        return samples

    def _generate(self, samples: list[_Sample], sampling: SamplingParams) -> list[Draw]:
        """Return one draw per step until every row has ended."""
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
                generation_config=load_transformers().GenerationConfig(
                    max_new_tokens=sampling.max_new_tokens,
                    do_sample=False,
                    eos_token_id=None if sampling.ignore_eos else list(self._config.eos_ids),
                    pad_token_id=0,
                ),
                logits_processor=load_transformers().LogitsProcessorList([draws]),
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
        # Every row is generated until the whole batch has ended.
        ends = (i + 1 for i, token in enumerate(token_ids) if token in eos_ids)
        length = next(ends, len(token_ids))
        return complete(
            sample.sample_id,
            token_ids[:length],
            log_probs=log_probs[:length],
            eos_ids=eos_ids,
            versions=((0, self._weights_version),),
        )


class _KeyedDraws:
    """A logits processor that draws one token per row, and makes greedy search select it."""

    def __init__(
        self,
        seed: int,
        samples: list[_Sample],
        *,
        sampling: SamplingParams,
        device: torch.device,
    ) -> None:
        keys_B = stream_keys(
            seed,
            [sample.sample_id for sample in samples],
            first_indices=[sample.first_index for sample in samples],
            device=device,
        )
        positions_J = torch.arange(sampling.max_new_tokens, device=device)
        self._uniform_BJ = uniforms(keys_B, positions_J.expand(len(samples), -1))
        self._rule = DrawRule.of(sampling)
        self.done: list[Draw] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return (B, V), minus infinity everywhere except at the drawn token."""
        draw = draw_tokens(scores, self._uniform_BJ[:, len(self.done)], rule=self._rule)
        self.done.append(draw)
        return torch.full_like(scores, float("-inf")).scatter_(1, draw.token_B[:, None], 0.0)


def empty_model(folder: Path, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return transformers' model for a folder's config.json, with random weights."""
    transformers = load_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return module.to(device).requires_grad_(False)


@contextmanager
def _undisturbed(module: Any) -> Iterator[None]:
    """Suspend the model's generation defaults, which change scores, and its training mode."""
    defaults, training = module.generation_config, module.training
    module.generation_config = load_transformers().GenerationConfig()
    module.eval()
    try:
        yield
    finally:
        module.generation_config = defaults
        module.train(training)
