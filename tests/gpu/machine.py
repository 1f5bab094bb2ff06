# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder run on, and small random models and engines to run there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder
from tandem.models.folder import open_model
from tandem.models.kernels.operators import TRITON
from tandem.models.language_model import LanguageModel
from tandem.models.operators import Operators
from tandem.platforms.record import Platform
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import PagedRolloutEngine
from tandem.rollout.settings import CacheShape, NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=1.0, top_k=-1, max_new_tokens=24, ignore_eos=True)
SEED = 5


@dataclass(frozen=True)
class Machine:
    """``trial``: this is a CPU, kernels are interpreted, and sizes have to be tiny."""

    device: torch.device
    platform: Platform
    trial: bool


@dataclass(frozen=True)
class Shape:
    """A model to be made. But for qwen3, heads fill the hidden size, as families demand."""

    family: str
    head_dim: int
    kv_heads: int
    group: int
    vocabulary: int = 1000
    layers: int = 2

    def hf_config(self, *, trial: bool = False) -> PretrainedConfig:
        """As transformers describes it."""
        heads, head_dim = self.kv_heads * self.group, 16 if trial else self.head_dim
        hidden = (32 if trial else 256) if self.family == "qwen3" else heads * head_dim
        sizes = {
            "vocab_size": min(self.vocabulary, 80) if trial else self.vocabulary,
            "hidden_size": hidden,
            "intermediate_size": 48 if trial else 512,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": self.family != "llama",
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if self.family == "qwen2":
            return Qwen2Config(**sizes)
        family = {"qwen3": Qwen3Config, "llama": LlamaConfig}[self.family]
        return family(**sizes, head_dim=head_dim)


def random_model(shape: Shape, machine: Machine) -> PreTrainedModel:
    """transformers' model in fp32 on the device; every weight is random and exact in bf16."""
    config = shape.hf_config(trial=machine.trial)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            spread = 0.1 if is_norm else 0.8 * config.hidden_size**-0.5
            parameter.normal_(1.0 if is_norm else 0.0, spread, generator=generator)
            parameter.copy_(parameter.bfloat16())
    return model.to(machine.device)


def open_ours(
    folder: Path, machine: Machine, *, dtype: torch.dtype, operators: Operators = TRITON
) -> LanguageModel:
    """Our model from what transformers wrote."""
    return open_model(str(folder), dtype=dtype, device=machine.device, operators=operators)


@dataclass(frozen=True)
class Pair:
    """The same weights as transformers' model in fp32, and in a folder."""

    theirs: PreTrainedModel
    folder: Path


def make_pair(shape: Shape, machine: Machine, folder: Path) -> Pair:
    """A random model of ``shape``."""
    theirs = random_model(shape, machine)
    theirs.save_pretrained(folder)
    return Pair(theirs, folder)


def make_engine(
    decoder: Decoder,
    machine: Machine,
    *,
    rows: int = 64,
    num_pages: int = 4096,
    eos_ids: tuple[int, ...] = (),
) -> PagedRolloutEngine:
    """An engine with captured steps where the platform captures; its cache has ``num_pages``."""
    config = NativeRolloutConfig(
        seed=SEED,
        eos_ids=eos_ids,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        max_cache_bytes=num_pages * PAGE_TOKENS * CacheShape.of(decoder).bytes_per_token,
    )
    return PagedRolloutEngine(
        decoder,
        config,
        make_capturer=machine.platform.make_capturer,
        num_multiprocessors=machine.platform.num_multiprocessors(),
    )


def requests_of(
    lengths: Sequence[int],
    *,
    samples: int = 1,
    vocabulary: int,
    sampling: SamplingParams = SAMPLED,
) -> list[GenerationRequest]:
    """One random prompt of each length."""
    rng = random.Random(1)
    return [
        GenerationRequest(
            tuple(range(samples * i, samples * i + samples)),
            tuple(rng.randrange(vocabulary) for _ in range(length)),
            sampling,
        )
        for i, length in enumerate(lengths)
    ]


def drain(engine: PagedRolloutEngine) -> dict[int, Completion]:
    """All completions by sample."""
    finished: dict[int, Completion] = {}
    while completions := engine.advance():
        finished.update({completion.sample_id: completion for completion in completions})
    return finished
