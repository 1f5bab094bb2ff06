# SPDX-License-Identifier: Apache-2.0
"""The keyed draw as a sampler, over a stand-in for the sampler of vLLM's second model runner. The
runner itself is in ``tests/engines/second_runner.py``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tandem.rollout.keyed_random import uniforms
from tandem.rollout.sampler import DrawRule, draw_rows, draw_tokens
from tandem.rollout.vllm.draw import DrawnLogProbs, Stream
from tandem.rollout.vllm.second_runner import KeyedSampler

WARM = DrawRule(1.0, -1, 1.0)
PROMPT_LENGTHS = np.array([4, 6, 5], dtype=np.int32)


class _Sampler:
    """A sampler of vLLM's that calls its own draw and keeps what it is told."""

    penalties = "kept"

    def __init__(self) -> None:
        self.req_states = SimpleNamespace(prompt_len=SimpleNamespace(np=PROMPT_LENGTHS))
        self.added: list[tuple[Any, ...]] = []

    def add_request(self, *given: Any) -> None:
        self.added.append(given)

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        return self.sample(logits, input_batch.idx_mapping_np, return_logprobs=False)[0].tolist()

    def sample(self, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("vLLM's own draw is not asked for")


def _input_batch(
    places: list[int], *, computed: list[int], scheduled: list[int], prefill: list[int]
) -> Any:
    return SimpleNamespace(
        idx_mapping_np=np.array(places, dtype=np.int32),
        num_computed_tokens_np=np.array(computed, dtype=np.int32),
        num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
        prefill_len_np=np.array(prefill, dtype=np.int32),
    )


def _sampler(streams: dict[str, Stream]) -> KeyedSampler:
    return KeyedSampler(
        _Sampler(), streams.__getitem__, log_probs=DrawnLogProbs(), draw_rows=draw_rows
    )


def _expected(stream: Stream, logits_V: Tensor, position: int) -> int:
    """Return the token of a stream at a position."""
    uniform_B = uniforms(torch.tensor([stream.key]), torch.tensor([[position]]))[:, 0]
    return int(draw_tokens(logits_V[None], uniform_B, rule=stream.rule).token_B[0])


@pytest.fixture
def logits_BV() -> Tensor:
    """Two rows over 1,000 tokens."""
    return torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))


def test_tokens_are_keyed_by_their_index_in_the_response(logits_BV: Tensor) -> None:
    streams = {"a": Stream(1, WARM), "b": Stream(2, WARM)}
    sampler = _sampler(streams)
    sampler.add_request(0, 4, "a")  # with the length of the prompt, as vLLM 0.26 does
    sampler.add_request(2, "b")
    assert sampler.added == [(0, 4, "a"), (2, "b")]
    assert sampler.penalties == "kept"
    for step in range(3):
        computed, scheduled = ([0, 0], [5, 4]) if step == 0 else ([4 + step, 3 + step], [1, 1])
        given = _input_batch([2, 0], computed=computed, scheduled=scheduled, prefill=[5, 4])
        drawn = sampler(logits_BV, given)
        assert drawn == [
            _expected(streams["b"], logits_BV[0], step),
            _expected(streams["a"], logits_BV[1], step),
        ]
        assert [len(stream.log_probs) for stream in streams.values()] == [step + 1, step + 1]


def test_a_prompt_in_chunks_and_one_that_is_computed_again_draw_with_their_last_chunk(
    logits_BV: Tensor,
) -> None:
    """The second stream was interrupted after two tokens, which are computed with its prompt."""
    streams = {"a": Stream(1, WARM), "b": Stream(2, WARM, log_probs=[-1.0, -2.0])}
    sampler = _sampler(streams)
    sampler.add_request(1, "a")
    sampler.add_request(2, "b")
    sampler(logits_BV, _input_batch([1, 2], computed=[0, 0], scheduled=[3, 4], prefill=[6, 7]))
    assert streams["a"].log_probs == []
    assert streams["b"].log_probs == [-1.0, -2.0]
    given = _input_batch([1, 2], computed=[3, 4], scheduled=[2, 3], prefill=[6, 7])
    assert sampler(logits_BV, given)[1] == _expected(streams["b"], logits_BV[1], 2)
    assert streams["a"].log_probs == []
    assert len(streams["b"].log_probs) == 3


def test_a_place_that_another_request_takes_has_its_stream(logits_BV: Tensor) -> None:
    streams = {"a": Stream(1, WARM), "b": Stream(2, WARM)}
    sampler = _sampler(streams)
    given = _input_batch([1], computed=[0], scheduled=[6], prefill=[6])
    for name, stream in streams.items():
        sampler.add_request(1, name)
        assert sampler(logits_BV[:1], given) == [_expected(stream, logits_BV[0], 0)]
        assert len(stream.log_probs) == 1


def test_a_version_begins_after_the_tokens_that_were_drawn(logits_BV: Tensor) -> None:
    stream = Stream(1, WARM)
    stream.use_version(3)
    sampler = _sampler({"a": stream})
    sampler.add_request(0, "a")
    sampler(logits_BV[:1], _input_batch([0], computed=[0], scheduled=[4], prefill=[4]))
    stream.use_version(4)
    assert stream.versions == [(0, 3), (1, 4)]
