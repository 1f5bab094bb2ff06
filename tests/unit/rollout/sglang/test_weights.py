# SPDX-License-Identifier: Apache-2.0
"""The weights that SGLang's process gets, and versions that are refused. SGLang is absent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from tandem.api import EngineFailure
from tandem.rollout.sglang.weights import SglangSink, SharedMemory
from tandem.types import SliceSpec

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5), "c": torch.zeros(1, 1)}


class FakeProcess:
    """What the process of SGLang reads from the shared memory, and what it answers."""

    def __init__(self, memory: SharedMemory, account: Mapping[str, list[str]]) -> None:
        self.memory, self.account = memory, account
        self.calls: list[str] = []
        self.found: dict[str, torch.Tensor] = {}

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        self.calls.append(name)
        for one in arguments.get("tensors", ()):
            dtype = getattr(torch, one["dtype"])
            num_bytes = torch.Size(one["shape"]).numel() * dtype.itemsize
            data = self.memory.bytes[one["offset"] : one["offset"] + num_bytes].clone()
            self.found[one["name"]] = data.view(dtype).view(one["shape"])
        return self.account if name == "end" else None


def _manifest(dtype: torch.dtype) -> list[SliceSpec]:
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    return [SliceSpec(n, dtype, shape, (0,) * len(shape), shape) for n, shape in shapes.items()]


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(_manifest(torch.float32))
    yield memory
    memory.close()


def _sink(
    memory: SharedMemory,
    account: Mapping[str, list[str]] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> tuple[SglangSink, FakeProcess, list[int]]:
    process = FakeProcess(memory, account or {"errors": [], "unwritten": []})
    ended: list[int] = []
    sink = SglangSink(
        process,
        _manifest(dtype),
        family="qwen2",
        memory=memory,
        keeps_cache=False,
        on_end=ended.append,
    )
    return sink, process, ended


def test_tensors_come_in_the_precision_of_the_engine(memory: SharedMemory) -> None:
    sink, process, ended = _sink(memory, dtype=torch.bfloat16)
    sink.begin(4)
    for name, tensor in TENSORS.items():
        sink.take(name, tensor)
    sink.end()
    assert process.calls == ["begin", "take", "end"]
    assert ended == [4]
    for name, tensor in TENSORS.items():
        assert torch.equal(process.found[name], tensor.bfloat16())


def test_a_full_memory_is_emptied_before_the_next_tensor(memory: SharedMemory) -> None:
    memory.num_bytes = 64
    sink, process, _ = _sink(memory)
    sink.begin(1)
    for name, tensor in TENSORS.items():
        sink.take(name, tensor)
    sink.end()
    assert process.calls == ["begin", "take", "take", "take", "end"]
    assert all(torch.equal(process.found[name], tensor) for name, tensor in TENSORS.items())


def test_names_are_accounted_for_in_both_directions(memory: SharedMemory) -> None:
    for left_out in TENSORS:
        sink, process, ended = _sink(memory)
        sink.begin(1)
        for name, tensor in TENSORS.items():
            if name != left_out:
                sink.take(name, tensor)
        with pytest.raises(EngineFailure, match=f"SGLang: weights are missing: {left_out}$"):
            sink.end()
        assert "end" not in process.calls and ended == []
    sink, _, _ = _sink(memory)
    sink.begin(1)
    sink.take("a", TENSORS["a"])
    for name in ("a", "d"):
        with pytest.raises(EngineFailure, match=f"weight {name} came twice, or is not in the"):
            sink.take(name, TENSORS["a"])


@pytest.mark.parametrize(
    ("account", "message"),
    [
        ({"errors": ["a: ValueError: no"], "unwritten": []}, "did not load a: ValueError: no$"),
        (
            {"errors": [], "unwritten": ["z", "y", "x", "w"]},
            "parameters were not written: w, x, y and 1 more$",
        ),
    ],
)
def test_the_account_of_sglang_decides(
    memory: SharedMemory, account: dict[str, list[str]], message: str
) -> None:
    sink, _, ended = _sink(memory, account)
    sink.begin(1)
    for name, tensor in TENSORS.items():
        sink.take(name, tensor)
    with pytest.raises(EngineFailure, match=message):
        sink.end()
    assert ended == []
