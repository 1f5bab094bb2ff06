# SPDX-License-Identifier: Apache-2.0
"""Texts by the table of bytes are those of tokenizers, whatever the ids."""

from __future__ import annotations

import random
from array import array

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.data.byte_decoder import ByteDecoder
from tests.fakes.made_tokenizers import TEMPLATES, codec_for


def made(name: str) -> Tokenizer:
    return codec_for(name).tokenizer.backend_tokenizer


def with_odd_tokens() -> Tokenizer:
    """All bytes, a hole in the ids, and added tokens with foreign letters, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary | {"\u0120\u0120": 300}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["with space", "\u4e2d", AddedToken("\uff5cend\uff5c", special=True)])
    return tokenizer


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize(
    "name", ["odd", *sorted(file.stem for file in TEMPLATES.glob("*.jinja"))[:2]]
)
def test_texts_are_those_of_the_tokenizer(name: str, skip_special: bool) -> None:
    tokenizer = with_odd_tokens() if name == "odd" else made(name)
    decoder = ByteDecoder(tokenizer)
    largest = max(tokenizer.get_vocab().values())
    rng = random.Random(0)
    for length in [0, 1, 2, 3] + [40] * 300:
        ids = array("i", [rng.randint(0, largest) for _ in range(length)])
        expected = tokenizer.decode(ids, skip_special_tokens=skip_special)
        assert decoder.decode(ids, skip_special=skip_special) == expected
        assert decoder.decode(list(ids), skip_special=skip_special) == expected


def test_ids_beyond_the_vocabulary_are_left_out_as_in_tokenizers() -> None:
    tokenizer = with_odd_tokens()
    ids = [65, 10_000, 66]
    expected = tokenizer.decode(ids)
    assert ByteDecoder(tokenizer).decode(ids, skip_special=True) == expected
    assert len(expected) == 2


def test_only_byte_level_vocabularies_have_such_a_table() -> None:
    tokenizer = with_odd_tokens()
    assert ByteDecoder.can_decode(tokenizer)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert not ByteDecoder.can_decode(tokenizer)


def test_a_codec_decodes_many_ids_as_few() -> None:
    codec = codec_for(sorted(file.stem for file in TEMPLATES.glob("*.jinja"))[0])
    rng = random.Random(0)
    ids = [[rng.randrange(500) for _ in range(100)] for _ in range(60)]
    assert codec.decode(ids) == [codec.decode([one])[0] for one in ids]
    assert codec._byte_decoder is not None
