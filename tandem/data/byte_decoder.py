# SPDX-License-Identifier: Apache-2.0
"""Decoding for byte-level vocabularies by a table of the bytes of each token.

It gives the texts of ``tokenizers`` in a fraction of the processor time. Decoding took half of that
of the driver in a large run (``docs/scale.md``).

Shapes: T tokens of a sequence, B bytes of its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders


def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for, as in GPT-2.

    Printable bytes stand for themselves. The others, in their order, are the letters from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _bytes_of_letters()
_LETTER_SET = frozenset(_LETTERS)
_TO_LATIN = str.maketrans({letter: chr(byte) for letter, byte in _LETTERS.items()})


class ByteDecoder:
    """A decoder for one tokenizer. It keeps the bytes of all tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Make the tables, which takes about a microsecond for each token."""
        self._tokenizer = tokenizer
        size = max(tokenizer.get_vocab().values(), default=-1) + 1
        tokens = [tokenizer.id_to_token(number) for number in range(size)]
        added = tokenizer.get_added_tokens_decoder().values()
        special = {token.content for token in added if token.special}
        # Ids that no token has are left out of texts, as in tokenizers.
        every = [b"" if token is None else _bytes(token) for token in tokens]
        plain = [
            b"" if token in special else part for token, part in zip(tokens, every, strict=True)
        ]
        self._every, self._plain = _Table(every), _Table(plain)

    @staticmethod
    def can_decode(tokenizer: tokenizers.Tokenizer) -> bool:
        """Return whether the texts would be those of the tokenizer."""
        return isinstance(tokenizer.decoder, decoders.ByteLevel)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of one sequence. Bytes that are no UTF-8 become U+FFFD."""
        ids_T = np.asarray(ids, np.int64 if isinstance(ids, list) else None)
        if not len(ids_T):
            return ""
        table = self._plain if skip_special else self._every
        if ids_T.min() < 0 or ids_T.max() >= len(table):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return table.join(ids_T).decode("utf-8", "replace")


class _Table:
    """The bytes of the tokens, one after another, by the id of the token.

    Looking up a Python object for each token would take three times as long.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._bytes = np.frombuffer(b"".join(tokens), np.uint8)
        self._lengths = np.array([len(token) for token in tokens], np.int32)
        self._starts = np.cumsum(self._lengths, dtype=np.int32) - self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def join(self, ids_T: np.ndarray) -> bytes:
        """Return the bytes of tokens in order."""
        lengths_T = self._lengths[ids_T]
        stops_T = np.cumsum(lengths_T, dtype=np.int32)
        # How far the bytes of each token are in the table from their place in the text.
        moves_B = np.repeat(self._starts[ids_T] - stops_T + lengths_T, lengths_T)
        moves_B += np.arange(len(moves_B), dtype=np.int32)
        return self._bytes[moves_B].tobytes()


def _bytes(token: str) -> bytes:
    """Return the bytes of a token. One with a foreign letter was added, and stands for itself."""
    if _LETTER_SET.issuperset(token):
        return token.translate(_TO_LATIN).encode("latin-1")
    return token.encode()
