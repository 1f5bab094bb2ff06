# SPDX-License-Identifier: Apache-2.0
"""The paged engine generates with pictures what the dense engine does: samples that enter later,
rows whose pages are computed again, prompts that end in a picture, and prompts of text beside them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder
from tandem.models.folder import open_model
from tandem.models.kernels.operators import TRITON
from tandem.models.operators import TORCH, Operators
from tandem.platforms.capture import eager
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import PagedRolloutEngine
from tandem.rollout.settings import CacheShape, NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.draining import drain_by_sample
from tests.fakes.tiny_vision import FAMILIES, VOCAB, draw_prompt, write_seeing

MAX_ERROR = 1e-5
"""Sums in another order, in fp32; log-probs with wrong positions differ by more than 0.01."""
SAMPLED = SamplingParams(1.0, 1.0, -1, 5, ignore_eos=True)
LENGTHS = (5, 20, 20)
"""The tokens of the samples of each prompt. A window has 8 steps: some go on while others enter."""
ROWS = 4


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random model of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    write_seeing(request.param, folder)
    return folder


def _fast(device: torch.device) -> Operators:
    """torch's operators on a CPU, where interpreted ones take most of the time."""
    return TORCH if device.type == "cpu" else TRITON


def _decoder(folder: Path, device: torch.device, operators: Operators) -> Decoder:
    model = open_model(str(folder), dtype=torch.float32, device=device, operators=operators)
    assert model.decoder is not None
    return model.decoder


def _config(decoder: Decoder, *, num_pages: int = 256) -> NativeRolloutConfig:
    return NativeRolloutConfig(
        seed=1,
        eos_ids=(VOCAB - 1,),
        max_num_seqs=ROWS,
        max_num_batched_tokens=60,
        max_cache_bytes=num_pages * PAGE_TOKENS * CacheShape.of(decoder).bytes_per_token,
    )


def _paged(decoder: Decoder, *, num_pages: int = 256) -> PagedRolloutEngine:
    config = _config(decoder, num_pages=num_pages)
    return PagedRolloutEngine(decoder, config, make_capturer=eager, num_multiprocessors=1)


def _requests() -> list[GenerationRequest]:
    """Return requests of three samples each; the last prompt ends in a picture."""
    rng, first_id = random.Random(3), VOCAB
    found: list[GenerationRequest] = []
    for index, sizes in enumerate(([], [(3, 2), (2, 5)], [(2, 7)])):
        ids, pictures = draw_prompt(rng, sizes, first_id=first_id)
        first_id += sum(rows * columns for rows, columns in sizes)
        if index == 2:
            ids = ids[: ids.index(pictures[-1].token_ids[-1]) + 1]
        samples = tuple(range(10 * index, 10 * index + 3))
        sampling = replace(SAMPLED, max_new_tokens=LENGTHS[index])
        found.append(GenerationRequest(samples, tuple(ids), sampling, pictures=pictures))
    return found


def _assert_same(found: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert found.keys() == expected.keys()
    for sample_id, one in expected.items():
        assert found[sample_id].token_ids == one.token_ids
        assert found[sample_id].log_probs == pytest.approx(one.log_probs, abs=MAX_ERROR)


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[int, Completion]:
    """What the dense engine generates, which equals transformers' tokens (VL6)."""
    decoder = _decoder(folder, torch.device("cpu"), TORCH)
    dense = NativeRolloutEngine(decoder, _config(decoder))
    dense.add(_requests())
    return drain_by_sample(dense)


def test_tokens_are_those_of_the_dense_engine(
    folder: Path, device: torch.device, expected: dict[int, Completion]
) -> None:
    engine = _paged(_decoder(folder, device, _fast(device)))
    engine.add(_requests())
    _assert_same(drain_by_sample(engine), expected)
    lengths = [len(request.prompt_ids) for request in _requests()]
    assert engine.num_prefilled_tokens > sum(lengths), "samples entered beside others of a prompt"


def test_pages_that_are_computed_again_have_the_same_positions(
    folder: Path, device: torch.device, expected: dict[int, Completion]
) -> None:
    engine = _paged(_decoder(folder, device, _fast(device)))
    engine.add(_requests())
    early: list[Completion] = []
    num_recomputed = 0
    for version in range(1, 4):  # the weights are the same
        early += engine.advance(8)
        engine.set_weights_version(version)
        num_recomputed += len(engine._scheduler.rows)
    found = {one.sample_id: one for one in early} | drain_by_sample(engine)
    assert num_recomputed > 0, "rows ran when the versions came"
    _assert_same(found, expected)


def test_preempted_rows_see_their_pictures_again(folder: Path, device: torch.device) -> None:
    """The cache has three pages, which two samples outgrow (as in test_engine)."""
    ids, pictures = draw_prompt(random.Random(5), [(3, 4)], first_id=VOCAB)
    ids += [20] * (PAGE_TOKENS - 11 - len(ids))
    sampling = replace(SAMPLED, max_new_tokens=13)
    request = GenerationRequest((0, 1), tuple(ids), sampling, pictures=pictures)
    dense_decoder = _decoder(folder, torch.device("cpu"), TORCH)
    dense = NativeRolloutEngine(dense_decoder, _config(dense_decoder))
    dense.add([request])
    paged = _paged(_decoder(folder, device, TRITON), num_pages=3)
    paged.add([request])
    _assert_same(drain_by_sample(paged), drain_by_sample(dense))
    assert paged.metrics()["num_preempted"] == 1
