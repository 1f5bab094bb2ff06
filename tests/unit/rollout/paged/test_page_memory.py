# SPDX-License-Identifier: Apache-2.0
"""When the paged engine's memory goes: at once, and before larger one is taken."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder
from tandem.platforms.capture import eager
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import PagedRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import GenerationRequest, SamplingParams
from tests.fakes.tiny_decoder import tiny_decoder

HEAD_DIM = 16
PAGE = (1, PAGE_TOKENS, HEAD_DIM)
SAMPLED = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=12, ignore_eos=True)
CONFIG = NativeRolloutConfig(
    seed=1,
    eos_ids=(0,),
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=1 << 20,
)


class Allocations(TorchFunctionMode):
    """Notes, each time pages are allocated, how many there are already."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros and args and tuple(args[0])[1:] == PAGE:
            self.alive.append(num_pages())
        return func(*args, **(kwargs or {}))


def num_pages() -> int:
    """Pages of keys, or of values, that anything refers to."""
    tensors = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return sum(len(tensor) for tensor in tensors if tensor.shape[1:] == PAGE)


@pytest.fixture(autouse=True)
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def engine(device: torch.device) -> PagedRolloutEngine:
    decoder: Decoder = tiny_decoder(
        vocab_size=32, num_heads=2, num_kv_heads=1, head_dim=HEAD_DIM, tie_embeddings=False
    )
    return PagedRolloutEngine(
        decoder.to(device), CONFIG, make_capturer=eager, num_multiprocessors=1
    )


def request(first_id: int, *, n: int, length: int) -> GenerationRequest:
    prompt = tuple(1 + (first_id + i) % 31 for i in range(length))
    return GenerationRequest(tuple(range(first_id, first_id + n)), prompt, SAMPLED)


def test_a_released_cache_is_gone(engine: PagedRolloutEngine) -> None:
    engine.add([request(0, n=2, length=5)])
    while engine.advance():
        assert num_pages() > 0
    assert engine.sleep()
    assert num_pages() == 0


@pytest.mark.parametrize("under_way", [False, True])
def test_more_pages_are_taken_when_the_old_are_gone(
    engine: PagedRolloutEngine, under_way: bool
) -> None:
    """Whether nothing runs or something does, which goes on with what it has drawn."""
    with Allocations() as allocations:
        engine.add([request(0, n=1, length=5)])
        finished = engine.advance(max_steps=8) if under_way else engine.advance()
        assert len(finished) == (0 if under_way else 1)
        before = len(allocations.alive)
        engine.add([request(10, n=3, length=2 * PAGE_TOKENS)])
        while completions := engine.advance():
            finished += completions
    assert sorted(completion.sample_id for completion in finished) == [0, 10, 11, 12]
    assert len(allocations.alive) == 2 * before > 0
    assert allocations.alive[0] == allocations.alive[before] == 0
