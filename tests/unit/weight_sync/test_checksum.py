# SPDX-License-Identifier: Apache-2.0
"""The checksum is the stated sum, and tells tensors apart."""

from __future__ import annotations

import pytest
import torch

from tandem.weight_sync import checksum as module
from tandem.weight_sync.checksum import SAMPLING, checksum, is_sampled


def _stated(data: bytes) -> int:
    whole = len(data) - len(data) % 4
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, whole, 4)]
    words += data[whole:]
    return sum((i + 1) * word for i, word in enumerate(words)) % 2**64


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 7, 4096, 100_003])
def test_it_is_the_stated_sum(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK_WORDS, "cpu", 1000)
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert int(checksum(data)) % 2**64 == _stated(data.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_layout_in_memory_does_not_matter_and_every_element_does(dtype: torch.dtype) -> None:
    tensor = (10 * torch.randn(9, 7)).to(dtype)
    room = torch.empty(2 + tensor.numel(), dtype=dtype)[1:-1].view(tensor.shape).copy_(tensor)
    expected = int(checksum(tensor))
    assert int(checksum(tensor.t().contiguous().t())) == expected
    assert int(checksum(room)) == expected, "of storage at an odd offset"
    for index in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[index] += 1
        assert int(checksum(other)) != expected
    assert int(checksum(tensor.flip(0))) != expected, "the same words in other places"


def test_single_elements_have_one_however_they_are_stored() -> None:
    expected = _stated(torch.tensor([2.5]).numpy().tobytes())
    column = torch.full((3, 5), 2.5).t()[:1, :1]
    for tensor in (torch.tensor(2.5), torch.tensor([2.5]), column):
        assert int(checksum(tensor)) == expected


def test_each_segment_is_sampled_once_in_a_round_of_versions() -> None:
    for segment in range(40):
        assert sum(is_sampled(segment, version) for version in range(SAMPLING)) == 1
