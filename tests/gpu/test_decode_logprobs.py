# SPDX-License-Identifier: Apache-2.0
"""Log-probs that decoding reports, against full passes over the same tokens by our model and by
transformers': all families, 1 to 8 query heads a key head, both head sizes, contexts across page
borders, batches of 1 to 1024.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.language_model import LanguageModel
from tandem.types import Completion, GenerationRequest
from tests.gpu.machine import (
    SAMPLED,
    Machine,
    Pair,
    Shape,
    drain,
    make_engine,
    make_pair,
    open_ours,
    requests_of,
)
from tests.unit.models.tiny_models import pack_separate

SHAPES = {
    "qwen3_128x1": Shape("qwen3", 128, 2, 1),
    "qwen2_128x2": Shape("qwen2", 128, 1, 2),
    "qwen3_64x3": Shape("qwen3", 64, 2, 3),
    "llama_64x4": Shape("llama", 64, 2, 4),
    "llama_64x5": Shape("llama", 64, 1, 5),
    "llama_128x6": Shape("llama", 128, 1, 6),
    "qwen2_64x7": Shape("qwen2", 64, 2, 7),
    "qwen3_128x8": Shape("qwen3", 128, 1, 8),
}
IN_BF16 = ("qwen2_128x2", "llama_64x4", "qwen2_64x7", "qwen3_128x8")
TRIED = ("qwen3_64x3", "llama_64x4", "qwen2_64x7")
LENGTHS = (1, 2, 17, 62, 63, 64, 65, 66, 100, 127, 128, 129, 190, 192, 255, 256, 257, 276)
"""Of prompts; with 24 tokens behind them contexts go to 300."""


def generated(
    model: LanguageModel, requests: list[GenerationRequest], *, machine: Machine, rows: int = 64
) -> dict[int, Completion]:
    """What the engine makes of the requests."""
    assert model.decoder is not None
    engine = make_engine(model.decoder, machine, rows=rows)
    engine.add(requests)
    return drain(engine)


@torch.no_grad()
def full_pass(
    model: LanguageModel, requests: list[GenerationRequest], finished: dict[int, Completion]
) -> Tensor:
    """Log-probs of all responses as the trainer computes them, in the order of ``reported``."""
    prompts = [list(request.prompt_ids) for request in requests]
    responses = [[list(finished[i].token_ids) for i in r.sample_ids] for r in requests]
    packed = pack_separate(prompts, responses)
    scores = model.operators.token_log_probs(
        model.hidden(packed)[packed.source_R.to(model.lm_head_weight.device)],
        model.lm_head_weight,
        target_R=packed.target_R.to(model.lm_head_weight.device),
        temperature=SAMPLED.temperature,
        with_entropy=False,
    )
    return scores.logp_R.cpu()


@torch.no_grad()
def by_transformers(
    pair: Pair, requests: list[GenerationRequest], finished: dict[int, Completion]
) -> Tensor:
    """The same by transformers' model in fp32, one sequence at a time."""
    found: list[Tensor] = []
    for request in requests:
        for sample_id in request.sample_ids:
            response = finished[sample_id].token_ids
            ids = (*request.prompt_ids, *response)
            ids_1T = torch.tensor([ids], device=pair.theirs.device)
            logits_TV = pair.theirs(input_ids=ids_1T, use_cache=False).logits[0]
            logits_RV = logits_TV[len(request.prompt_ids) - 1 : -1].double() / SAMPLED.temperature
            target_R1 = ids_1T[0, len(request.prompt_ids) :, None]
            found.append(logits_RV.log_softmax(-1).gather(1, target_R1)[:, 0].cpu())
    return torch.cat(found)


def reported(requests: list[GenerationRequest], finished: dict[int, Completion]) -> Tensor:
    """What decoding said."""
    return torch.tensor(
        [
            logp
            for r in requests
            for sample_id in r.sample_ids
            for logp in finished[sample_id].log_probs
        ]
    )


def check_close(actual: Tensor, expected: Tensor, *, mean: float, largest: float) -> None:
    """Bounds on the mean and on the greatest difference."""
    difference = (actual.double() - expected.double()).abs()
    assert float(difference.mean()) <= mean, f"mean {float(difference.mean())}"
    assert float(difference.max()) <= largest, f"greatest {float(difference.max())}"


def contexts(pair: Pair, machine: Machine) -> list[GenerationRequest]:
    """Two samples of each of ``LENGTHS``."""
    lengths = (3, 63) if machine.trial else LENGTHS
    sampling = replace(SAMPLED, max_new_tokens=3) if machine.trial else SAMPLED
    vocabulary = pair.theirs.config.vocab_size
    return requests_of(lengths, samples=2, vocabulary=vocabulary, sampling=sampling)


@pytest.mark.parametrize("name", SHAPES)
def test_fp32(name: str, machine: Machine, tmp_path: Path) -> None:
    if machine.trial and name not in TRIED:
        pytest.skip("a trial takes a shape of each family")
    pair = make_pair(SHAPES[name], machine, tmp_path)
    model = open_ours(pair.folder, machine, dtype=torch.float32)
    requests = contexts(pair, machine)
    finished = generated(model, requests, machine=machine)
    actual = reported(requests, finished)
    check_close(actual, full_pass(model, requests, finished), mean=1e-5, largest=1e-4)
    check_close(actual, by_transformers(pair, requests, finished), mean=1e-5, largest=1e-4)


@pytest.mark.parametrize("name", IN_BF16)
def test_bf16(name: str, machine: Machine, tmp_path: Path) -> None:
    """The trainer is as near as rounding lets it be, and both are near the truth."""
    if machine.trial:
        pytest.skip("the interpreter has no products of bf16")
    pair = make_pair(SHAPES[name], machine, tmp_path)
    model = open_ours(pair.folder, machine, dtype=torch.bfloat16)
    requests = contexts(pair, machine)
    finished = generated(model, requests, machine=machine)
    actual = reported(requests, finished)
    check_close(actual, full_pass(model, requests, finished), mean=0.015, largest=0.1)
    check_close(actual, by_transformers(pair, requests, finished), mean=0.015, largest=0.1)


@pytest.mark.parametrize("rows", [1, 7, 64, 1024])
def test_any_batch(rows: int, machine: Machine, tmp_path: Path) -> None:
    """Few rows are each read by many programs, of many a program reads several; samples wait for
    rows that are free."""
    if machine.trial and rows > 7:
        pytest.skip("too many for a trial")
    pair = make_pair(Shape("qwen2", 64, 2, 7), machine, tmp_path)
    model = open_ours(tmp_path, machine, dtype=torch.float32)
    samples = min(rows + 1, 4)
    lengths = [
        1 + (37 * i) % (70 if machine.trial else 140) for i in range(-(-rows // samples) + 2)
    ]
    requests = requests_of(
        lengths[: 2 if machine.trial else None],
        samples=samples,
        vocabulary=pair.theirs.config.vocab_size,
        sampling=replace(SAMPLED, max_new_tokens=2 if machine.trial else 12),
    )
    finished = generated(model, requests, machine=machine, rows=rows)
    assert len(finished) == sum(len(request.sample_ids) for request in requests)
    for start in range(0, len(requests), 64):
        chosen = requests[start : start + 64]
        expected = full_pass(model, chosen, finished)
        check_close(reported(chosen, finished), expected, mean=1e-5, largest=1e-4)
