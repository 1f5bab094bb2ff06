# SPDX-License-Identifier: Apache-2.0
"""A number that tells whether a tensor arrived bit by bit, computed where the tensor lies."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD_BYTES = 4
_CHUNK_WORDS = {"cpu": 1 << 16}
_MANY_WORDS = 1 << 20
"""Words of one step, which bound the memory that their products take (16 bytes a word): what fits
into a CPU's cache, elsewhere enough to pay for the launches."""
SAMPLING = 32
"""After a first transfer in which all are checked, one piece in so many is."""


def is_checked(piece: int, version: int) -> bool:
    """Whether a piece is among the sampled ones; each is, in one of ``SAMPLING`` versions."""
    return (piece + version) % SAMPLING == 0


def checksum(tensor: Tensor) -> Tensor:
    """The sum over i of ``(i + 1) * w_i`` modulo 2^64, as an int64 scalar on the tensor's device.

    ``w_0, w_1, ...`` are the bytes of ``tensor`` in row-major order as signed little-endian words
    of 4 bytes, then, one word each, the bytes that are left over. Any single wrong word and any two
    different words that changed places are found.
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
