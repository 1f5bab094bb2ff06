# SPDX-License-Identifier: Apache-2.0
"""Decoding for byte-level vocabularies by a table of the bytes of each token.

It gives the texts of ``tokenizers`` and takes about a sixth of the processor time. Decoding took
half of that of the driver in a large run (``docs/scale.md``).
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
    """A decoder for one tokenizer. It keeps two pointers for each token."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Make the table, which takes about a microsecond for each token."""
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
        self._every, self._plain = np.array(every, object), np.array(plain, object)

    @staticmethod
    def can_decode(tokenizer: tokenizers.Tokenizer) -> bool:
        """Return whether the texts would be those of the tokenizer."""
        return isinstance(tokenizer.decoder, decoders.ByteLevel)

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return the text of one sequence. Bytes that are no UTF-8 become U+FFFD."""
        numbers = np.asarray(ids, np.int64 if isinstance(ids, list) else None)
        if not len(numbers):
            return ""
        if numbers.min() < 0 or numbers.max() >= len(self._every):
            return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        table = self._plain if skip_special else self._every
        return b"".join(table[numbers].tolist()).decode("utf-8", "replace")


def _bytes(token: str) -> bytes:
    """Return the bytes of a token. One with a foreign letter was added, and stands for itself."""
    if _LETTER_SET.issuperset(token):
        return token.translate(_TO_LATIN).encode("latin-1")
    return token.encode()
