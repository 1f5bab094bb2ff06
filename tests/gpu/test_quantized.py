# SPDX-License-Identifier: Apache-2.0
"""Generation in fp8 on a GPU: captured steps against full passes of the same quantized decoder, and
its log-probs against the trainer's.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.folder import adapt_folder, check_folder, open_part
from tandem.models.kernels.operators import TRITON
from tandem.models.language_model import LanguageModel
from tandem.models.parallel import WHOLE
from tandem.models.quantized import QuantizedDecoder
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import PagedRolloutEngine
from tandem.rollout.settings import CacheShape, NativeRolloutConfig
from tandem.types import Completion, GenerationRequest
from tests.fakes.tiny_adapters import ALL
from tests.gpu.machine import (
    SAMPLED,
    SEED,
    Machine,
    Shape,
    drain,
    make_pair,
    open_ours,
    requests_of,
)
from tests.gpu.test_decode_logprobs import check_close, full_pass, reported
from tests.unit.models.tiny_models import pack_separate

SHAPES = {
    "qwen2_64x7": Shape("qwen2", 64, 2, 7),
    "qwen3_128x8": Shape("qwen3", 128, 1, 8),
    "llama_64x4": Shape("llama", 64, 2, 4),
}
LENGTHS = (1, 17, 64, 65, 129)


def _engine(model: LanguageModel, machine: Machine) -> PagedRolloutEngine:
    decoder, platform = model.decoder, machine.platform
    assert decoder is not None
    config = NativeRolloutConfig(
        seed=SEED,
        eos_ids=(),
        max_num_seqs=16,
        max_num_batched_tokens=8192,
        max_cache_bytes=256 * PAGE_TOKENS * CacheShape.of(decoder).bytes_per_token,
    )
    return PagedRolloutEngine(
        decoder,
        config,
        make_capturer=platform.make_capturer,
        num_multiprocessors=platform.num_multiprocessors(),
        quantized=QuantizedDecoder(decoder),
    )


@torch.no_grad()
def _quantized_pass(
    model: LanguageModel, requests: list[GenerationRequest], finished: dict[int, Completion]
) -> Tensor:
    """Return the log-probs of all responses by a full pass of the quantized decoder."""
    prompts = [list(request.prompt_ids) for request in requests]
    responses = [[list(finished[i].token_ids) for i in r.sample_ids] for r in requests]
    packed = pack_separate(prompts, responses)
    decoder, device = model.decoder, model.lm_head_weight.device
    assert decoder is not None
    quantized = QuantizedDecoder(decoder)
    quantized.update()
    attention = decoder.operators.packed_attention(packed.segments, device)
    h_TD = quantized(packed.token_ids_T.to(device), packed.position_ids_T.to(device), attention)
    logits_RV = decoder.operators.logits(h_TD[packed.source_R.to(device)], decoder.lm_head_weight)
    logp_RV = (logits_RV / SAMPLED.temperature).log_softmax(-1)
    return logp_RV.gather(1, packed.target_R.to(device)[:, None])[:, 0].cpu()


@pytest.mark.parametrize("name", SHAPES)
def test_log_probs_are_those_of_the_quantized_decoder(
    name: str, machine: Machine, tmp_path: Path
) -> None:
    if machine.trial:
        pytest.skip("the interpreter has no products of bf16")
    pair = make_pair(SHAPES[name], machine, tmp_path)
    model = open_ours(pair.folder, machine, dtype=torch.bfloat16)
    requests = requests_of(LENGTHS, samples=2, vocabulary=pair.theirs.config.vocab_size)
    engine = _engine(model, machine)
    engine.add(requests)
    finished = drain(engine)
    actual = reported(requests, finished)
    # Roundings of bf16 move a number of fp8 by a whole step of an eighth here and there.
    check_close(actual, _quantized_pass(model, requests, finished), mean=0.05, largest=0.5)
    check_close(actual, full_pass(model, requests, finished), mean=0.12, largest=1.2)


def test_new_weights_generate_in_captured_steps(machine: Machine, tmp_path: Path) -> None:
    if machine.trial:
        pytest.skip("the interpreter has no products of bf16")
    pair = make_pair(SHAPES["qwen2_64x7"], machine, tmp_path)
    model = open_ours(pair.folder, machine, dtype=torch.bfloat16)
    requests = requests_of(LENGTHS, samples=2, vocabulary=pair.theirs.config.vocab_size)
    engine = _engine(model, machine)
    engine.add(requests)
    drain(engine)
    with torch.no_grad():
        for weight in model.module.parameters():
            weight.mul_(0.8)
    engine.settle()
    engine.set_weights_version(1)
    engine.add(requests)
    finished = drain(engine)
    actual = reported(requests, finished)
    check_close(actual, _quantized_pass(model, requests, finished), mean=0.05, largest=0.5)


def test_captured_steps_add_adapters_to_products_in_fp8(machine: Machine, tmp_path: Path) -> None:
    """The adapters are large and change, so that a step without them or with old ones shows."""
    if machine.trial:
        pytest.skip("the interpreter has no products of bf16")
    pair = make_pair(SHAPES["qwen2_64x7"], machine, tmp_path)
    folder = adapt_folder(check_folder(str(pair.folder)), ALL, seed=SEED)
    model = open_part(folder, WHOLE, dtype=torch.bfloat16, device=machine.device, operators=TRITON)
    requests = requests_of(LENGTHS, samples=2, vocabulary=pair.theirs.config.vocab_size)
    engine = _engine(model, machine)
    for version, scale in enumerate((0.2, 0.1)):
        with torch.no_grad():
            for name, weight in model.module.named_parameters():
                if name.endswith("lora_b"):
                    weight.normal_(std=scale)
        engine.settle()
        engine.set_weights_version(version)
        engine.add(requests)
        finished = drain(engine)
        actual = reported(requests, finished)
        check_close(actual, _quantized_pass(model, requests, finished), mean=0.05, largest=0.5)
        check_close(actual, full_pass(model, requests, finished), mean=0.12, largest=1.2)
