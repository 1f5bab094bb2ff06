# SPDX-License-Identifier: Apache-2.0
"""What the paged engine generates: transformers' tokens when greedy, and the same tokens whatever
is shared, preempted, batched, recaptured or updated in between.

Passes over different batches round differently. A number that falls where two tokens meet may then
draw the other one; from there on the sequence is another, which is allowed to one in fifty.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.types import Completion, FinishReason, GenerationRequest, Segments
from tests.gpu.machine import (
    SAMPLED,
    Machine,
    Shape,
    drain,
    make_engine,
    make_pair,
    open_ours,
    requests_of,
)

GREEDY = replace(SAMPLED, temperature=0.0)
SHAPES = {
    "qwen2": Shape("qwen2", 64, 1, 4, vocabulary=200),
    "qwen3": Shape("qwen3", 128, 1, 2, vocabulary=200),
    "llama": Shape("llama", 64, 2, 2, vocabulary=200),
}
MAX_STRAYS = 0.02


@pytest.fixture
def decoder(machine: Machine, tmp_path: Path) -> Decoder:
    """A random Qwen2 model in fp32."""
    make_pair(SHAPES["qwen2"], machine, tmp_path)
    found = open_ours(tmp_path, machine, dtype=torch.float32).decoder
    assert found is not None
    return found


def prompts(machine: Machine, *lengths: int, new: int, samples: int = 1) -> list[GenerationRequest]:
    """Sampled requests; a trial takes the first two and few tokens."""
    lengths, new = (lengths[:2], min(new, 3)) if machine.trial else (lengths, new)
    sampling = replace(SAMPLED, max_new_tokens=new)
    return requests_of(lengths, samples=samples, vocabulary=80, sampling=sampling)


def check_same(actual: dict[int, Completion], expected: dict[int, Completion]) -> None:
    """Equal tokens but for strays, and equal log-probs as far as tokens are."""
    assert actual.keys() == expected.keys()
    strays = 0
    for sample_id, ours in actual.items():
        theirs = expected[sample_id]
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        strays += ours.token_ids != theirs.token_ids
        assert ours.log_probs[:same] == pytest.approx(theirs.log_probs[:same], abs=1e-4)
    assert strays <= MAX_STRAYS * len(expected), f"{strays} of {len(expected)} differ"


def generate(
    decoder: Decoder, requests: list[GenerationRequest], machine: Machine, *, rows: int = 512
) -> dict[int, Completion]:
    """By an engine of its own."""
    engine = make_engine(decoder, machine, rows=rows)
    engine.add(requests)
    return drain(engine)


def disturb(decoder: Decoder, machine: Machine) -> None:
    """Change the weights in place."""
    generator = torch.Generator(machine.device).manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device=machine.device)
            parameter.add_(noise * 0.2 * parameter.std().nan_to_num(0.0))


@torch.no_grad()
def full_log_probs(
    decoder: Decoder, request: GenerationRequest, completion: Completion
) -> torch.Tensor:
    """Of all tokens of a response, by a pass over the whole sequence alone; on the CPU."""
    weight, prompt = decoder.lm_head_weight, request.prompt_ids
    ids_T = torch.tensor((*prompt, *completion.token_ids), device=weight.device)
    none = torch.zeros(1, dtype=torch.int64)
    segments = Segments(none, torch.tensor([len(ids_T)]), none, none)
    attention = PackedAttention(segments, weight.device)
    h_TD = decoder(ids_T, torch.arange(len(ids_T), device=weight.device), attention)
    logits_RV = decoder.operators.logits(h_TD[len(prompt) - 1 : -1], weight)
    logp_RV = (logits_RV / request.sampling.temperature).log_softmax(-1)
    return logp_RV.gather(1, ids_T[len(prompt) :, None])[:, 0].cpu()


@pytest.mark.parametrize("family", SHAPES)
def test_greedy_tokens_are_those_of_transformers(
    family: str, machine: Machine, tmp_path: Path
) -> None:
    pair = make_pair(SHAPES[family], machine, tmp_path)
    ours = open_ours(tmp_path, machine, dtype=torch.float32).decoder
    assert ours is not None
    new = 4 if machine.trial else 48
    lengths = (5,) if machine.trial else (1, 20, 40, 63, 64, 65, 110, 200)
    sampling = replace(GREEDY, max_new_tokens=new)
    requests = requests_of(lengths, vocabulary=80, sampling=sampling)
    finished = generate(ours, requests, machine)
    for request in requests:
        ids_1T = torch.tensor([request.prompt_ids], device=machine.device)
        expected_1T = pair.theirs.generate(
            ids_1T,
            attention_mask=torch.ones_like(ids_1T),
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
        )
        expected = expected_1T[0, len(request.prompt_ids) :].tolist()
        assert list(finished[request.sample_ids[0]].token_ids) == expected


def test_preempted_sequences_come_back_with_the_same_tokens(
    decoder: Decoder, machine: Machine
) -> None:
    if machine.trial:
        requests = requests_of(
            (53, 53), vocabulary=80, sampling=replace(SAMPLED, max_new_tokens=13)
        )
    else:
        requests = prompts(machine, *range(40, 100, 5), new=80, samples=8)
    engine = make_engine(decoder, machine, rows=512, num_pages=3 if machine.trial else 50)
    engine.add(requests)
    preempted = drain(engine)
    assert engine.metrics()["num_preempted"] > 0
    check_same(preempted, generate(decoder, requests, machine))


def test_samples_that_share_a_prompt_equal_samples_that_do_not(
    decoder: Decoder, machine: Machine
) -> None:
    shared = prompts(machine, 63, 64, 65, 1, 128, 130, new=30, samples=2 if machine.trial else 9)
    apart = [
        GenerationRequest((sample_id,), request.prompt_ids, request.sampling)
        for request in shared
        for sample_id in request.sample_ids
    ]
    check_same(generate(decoder, shared, machine), generate(decoder, apart, machine))


def test_what_else_is_in_the_batch_does_not_matter(decoder: Decoder, machine: Machine) -> None:
    lengths = (3, 62, 7, 80, 66, 1, 129, 20)
    requests = prompts(machine, *lengths, new=40, samples=1 if machine.trial else 8)
    expected = generate(decoder, requests, machine)
    for rows in (2,) if machine.trial else (3, 17, 48):
        check_same(generate(decoder, requests, machine, rows=rows), expected)


def test_filters_and_greedy_rows_in_one_batch(decoder: Decoder, machine: Machine) -> None:
    rules = [
        SAMPLED,
        replace(SAMPLED, top_k=5),
        replace(SAMPLED, top_p=0.7),
        GREEDY,
        replace(SAMPLED, top_k=20, top_p=0.5, temperature=1.3),
    ]
    requests = [
        replace(request, sampling=replace(rule, max_new_tokens=2 if machine.trial else 24))
        for request, rule in zip(
            prompts(machine, *range(9, 19), new=24, samples=1),
            rules * 2,
            strict=False,
        )
    ]
    together = generate(decoder, requests, machine)
    alone: dict[int, Completion] = {}
    for request in requests:
        alone |= generate(decoder, [request], machine, rows=1)
    check_same(together, alone)


def test_longer_requests_while_others_are_under_way(decoder: Decoder, machine: Machine) -> None:
    """They take larger buffers, over which steps are captured anew."""
    first = prompts(machine, 5, 30, new=40, samples=1 if machine.trial else 20)
    quick = GenerationRequest((900,), (1, 2), replace(SAMPLED, max_new_tokens=1))
    longer = GenerationRequest((901, 902), (3,) * 150, replace(SAMPLED, max_new_tokens=3))
    engine = make_engine(decoder, machine, rows=64)
    engine.add([quick, *first])
    finished = {completion.sample_id: completion for completion in engine.advance()}
    engine.add([longer])
    finished |= drain(engine)
    check_same(finished, generate(decoder, [quick, *first, longer], machine))


def test_end_tokens_stop_captured_steps(decoder: Decoder, machine: Machine) -> None:
    requests = prompts(machine, 5, 30, 64, 90, new=40, samples=2 if machine.trial else 16)
    endless = generate(decoder, requests, machine)
    stopping = [replace(r, sampling=replace(r.sampling, ignore_eos=False)) for r in requests]
    eos_ids = (3, 7, 11, 19, 23, 42)
    engine = make_engine(decoder, machine, rows=48, eos_ids=eos_ids)
    engine.add(stopping)
    expected: dict[int, Completion] = {}
    for sample_id, completion in endless.items():
        ends = [i for i, token in enumerate(completion.token_ids) if token in eos_ids]
        stop = ends[0] + 1 if ends else len(completion.token_ids)
        expected[sample_id] = replace(
            completion,
            token_ids=completion.token_ids[:stop],
            log_probs=completion.log_probs[:stop],
        )
    lengths = {len(completion.token_ids) for completion in expected.values()}
    assert len(lengths) > 3 or machine.trial
    check_same(drain(engine), expected)


def test_captured_steps_see_weights_that_changed_in_place(
    decoder: Decoder, machine: Machine
) -> None:
    requests = prompts(machine, 5, 60, 64, 90, new=30, samples=1 if machine.trial else 12)
    engine = make_engine(decoder, machine)
    engine.add(requests)
    before = drain(engine)
    disturb(decoder, machine)
    engine.set_weights_version(1)
    engine.add(requests)
    after = drain(engine)
    check_same(after, generate(decoder, requests, machine))
    assert {completion.weights_version for completion in after.values()} == {1}
    changed = [after[i].token_ids != before[i].token_ids for i in before]
    assert sum(changed) > 0.9 * len(changed) or machine.trial


def test_memory_is_given_back_and_taken_again(decoder: Decoder, machine: Machine) -> None:
    """As often as a device both trains and generates; captured steps go and come with the cache."""
    requests = prompts(machine, 5, 60, 64, 90, new=20, samples=1 if machine.trial else 12)
    expected = generate(decoder, requests, machine)
    engine = make_engine(decoder, machine)
    left: list[int] = []
    for _ in range(2 if machine.trial else 6):
        engine.add(requests)
        check_same(drain(engine), expected)
        assert engine.sleep()
        if not machine.trial:
            torch.cuda.empty_cache()
            left.append(torch.cuda.memory_reserved())
    assert len(set(left[1:])) <= 1, f"bytes left behind after each time: {left}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_weights_that_change_within_groups_of_samples(
    dtype: torch.dtype, machine: Machine, tmp_path: Path
) -> None:
    """Some samples of a group run, some wait: log-probs of the new tokens are those of a full
    pass under the new weights, in bf16 by the attention that has more keys than queries."""
    if machine.trial and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products of bf16")
    make_pair(SHAPES["qwen2"], machine, tmp_path)
    decoder = open_ours(tmp_path, machine, dtype=dtype).decoder
    assert decoder is not None
    lengths = (66, 5) if machine.trial else (66, 5, 64, 1, 130, 63, 200)
    sampling = replace(SAMPLED, max_new_tokens=11 if machine.trial else 40)
    samples, rows = (2, 3) if machine.trial else (9, 50)
    requests = requests_of(lengths, samples=samples, vocabulary=80, sampling=sampling)
    engine = make_engine(decoder, machine, rows=rows)
    engine.add(requests)
    engine.advance(max_steps=8)
    engine.settle()
    prefilled = engine.num_prefilled_tokens
    disturb(decoder, machine)
    engine.set_weights_version(1)
    finished = drain(engine)
    runs = [completion.version_runs for completion in finished.values()]
    assert {len(versions) for versions in runs} == {1, 2}
    again = sum(versions[0][1] - 1 for versions in runs if len(versions) > 1)
    assert engine.num_prefilled_tokens - prefilled < again + 2 * sum(lengths)
    differences = torch.cat(
        [
            full_log_probs(decoder, request, finished[i]).sub(torch.tensor(finished[i].log_probs))[
                -finished[i].version_runs[-1][1] :
            ]
            for request in requests
            for i in request.sample_ids
            if finished[i].version_runs[-1][0] == 1
        ]
    ).abs()
    mean, largest = (1e-5, 1e-4) if dtype == torch.float32 else (0.015, 0.1)
    assert float(differences.mean()) <= mean and float(differences.max()) <= largest


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_logits_that_are_not_numbers_end_their_sample_alone(
    machine: Machine, tmp_path: Path
) -> None:
    make_pair(SHAPES["llama"], machine, tmp_path)  # whose embedding is not its head
    decoder = open_ours(tmp_path, machine, dtype=torch.float32).decoder
    assert decoder is not None
    poison = decoder.config.vocab_size - 1
    healthy = prompts(machine, 20, 70, new=20, samples=2 if machine.trial else 16)
    poisoned = GenerationRequest((500,), (poison, 5), SAMPLED)
    expected = generate(decoder, healthy, machine)
    with torch.no_grad():
        decoder.embedding.weight[poison] = float("nan")
    finished = generate(decoder, [poisoned, *healthy], machine)
    failed = finished.pop(500)
    assert len(failed.log_probs) == 1 and math.isnan(failed.log_probs[0])
    assert failed.finish_reason == FinishReason.FAILED
    unaffected = [i for i, c in expected.items() if poison not in c.token_ids]
    assert unaffected
    check_same({i: finished[i] for i in unaffected}, {i: expected[i] for i in unaffected})
