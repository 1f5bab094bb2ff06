# SPDX-License-Identifier: Apache-2.0
"""A checksum that shows whether a tensor arrived unchanged, computed on its device."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BYTES = 4
# The number of words multiplied at once; each takes 16 bytes of scratch memory. On a CPU a chunk
# fits into the cache. On other devices it is large enough to amortize the kernel launches.
_CHUNK_WORDS = {"cpu": 1 << 16}
_MANY_WORDS = 1 << 20
SAMPLING = 32
"""The first transfer checks all segments, a later one checks one segment in ``SAMPLING``."""


def is_sampled(segment: int, version: int) -> bool:
    """Return whether the segment is checked in ``version``: in one of ``SAMPLING`` versions."""
    return (segment + version) % SAMPLING == 0


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum over i of ``(i + 1) * w_i`` modulo 2^64, int64 (), on the tensor's device.

    The words ``w_0, w_1, ...`` are the bytes of ``tensor`` in row-major order, four bytes each as
    signed little-endian integers; each remaining byte is a word of its own. The checksum
    detects every single wrong word and every exchange of two different words.
    """
    flat = tensor.detach().contiguous()
    data = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    if data.storage_offset() % _WORD_BYTES:
        data = data.clone()
    whole = len(data) - len(data) % _WORD_BYTES
    words, rest = data[:whole].view(torch.int32), data[whole:]
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    start = 1
    chunk_words = _CHUNK_WORDS.get(data.device.type, _MANY_WORDS)
    for chunk in (*words.split(chunk_words), *([rest] if len(rest) else [])):
        numbers = torch.arange(start, start + len(chunk), device=data.device)
        total += (chunk * numbers).sum()
        start += len(chunk)
    return total
