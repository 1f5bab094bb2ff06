# SPDX-License-Identifier: Apache-2.0
"""Sequences that SGLang ends before they are whole, and caches in which they do not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.api import EngineFailure
from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec
from tandem.rollout.sglang import engine, program
from tests.fakes.tiny_qwen2 import write_random_qwen2

SAMPLE = {"id": 3, "prompt": [5, 6], "length": 4, "eos": [1], "draw": {}}


def generate(monkeypatch: pytest.MonkeyPatch, reason: Any, *, num_tokens: int) -> dict[str, Any]:
    """Generate a sample with an SGLang that answers so many tokens, and why it ended."""
    log_probs = [(-0.5, 7, None)] * num_tokens

    class Manager:
        async def generate_request(self, *_: Any) -> AsyncIterator[dict[str, Any]]:
            facts = {"output_token_logprobs": log_probs, "finish_reason": reason}
            yield {"meta_info": facts | {"cached_tokens": 0}}

    monkeypatch.setattr(program, "of_sglang", lambda *_: SimpleNamespace)
    made: Any = object.__new__(program.Program)
    made._manager, made._processor, made._version = Manager(), "", "0"
    made._num_reports, made._progress = 0, asyncio.Event()
    return asyncio.run(made._generate(SAMPLE))


@pytest.mark.parametrize(
    ("reason", "num_tokens"), [({"type": "stop", "matched": 1}, 2), ({"type": "length"}, 4)]
)
def test_a_sequence_that_is_whole_is_returned(
    monkeypatch: pytest.MonkeyPatch, reason: Any, num_tokens: int
) -> None:
    assert len(generate(monkeypatch, reason, num_tokens=num_tokens)["tokens"]) == num_tokens


@pytest.mark.parametrize(
    ("reason", "num_tokens", "said"),
    [
        ({"type": "length", "length": 3}, 3, "after 3 of 4 tokens .length"),
        ({"type": "abort", "message": "Out of\nmemory"}, 2, "after 2 of 4 tokens .Out of memory"),
        ({"type": "abort", "message": "Aborted"}, 4, "Aborted"),
        ({"type": "abort", "message": "Aborted"}, 0, "Aborted"),
        (None, 4, "None"),
    ],
)
def test_a_sequence_that_was_cut_is_no_sample(
    monkeypatch: pytest.MonkeyPatch, reason: Any, num_tokens: int, said: str
) -> None:
    with pytest.raises(RuntimeError, match=said):
        generate(monkeypatch, reason, num_tokens=num_tokens)


def test_a_cache_without_room_for_the_longest_sequence_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_random_qwen2(tmp_path, tied=True)
    model = open_model(str(tmp_path), dtype=torch.float32, device="cpu")
    spec = EngineSpec(model, tmp_path, RolloutConfig(name="sglang"), (0,), CPU, max_length=100)
    closed: list[int] = []

    def start(cache_tokens: int) -> None:
        process = SimpleNamespace(
            facts={"cache_tokens": cache_tokens}, close=lambda: closed.append(cache_tokens)
        )
        monkeypatch.setattr(engine, "SglangProcess", lambda *_, **__: process)
        engine.build(spec).close()

    start(108)
    with pytest.raises(EngineFailure, match="room for 107 tokens, .* needs 108 .*max_total_tokens"):
        start(107)
    assert closed == [108, 107], "its processes have ended"
