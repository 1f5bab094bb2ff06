# SPDX-License-Identifier: Apache-2.0
"""Rows to supervised examples, single-turn and multi-turn, and the source training draws them from.

Guarantees: loss falls on what the model itself would generate (the response and its end, or every
assistant turn after its generation prompt) and on nothing else; every row is checked before
training starts. Not here: the order of draws (``ledger``), packing (``packing``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from tandem.config.schema.sft import SftDataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.ledger import Ledger, LedgerOrder, fingerprint
from tandem.data.packing import TrainSequence
from tandem.data.selection import read_used_rows, truncate
from tandem.data.source import Source
from tandem.data.tokenizer import ChatRefused, Message, TextCodec, is_chat
from tandem.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A stretch of text tokenised on its own, as it is when the model generates what follows it.

    ``plain`` text gets the tokenizer's special tokens; rendered templates have theirs.
    """

    text: str
    carries_loss: bool
    plain: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SftExample:
    """One example: int32 ids and bool loss mask, (length,) each. The first token has no loss."""

    row: int
    token_ids: np.ndarray
    loss_mask: np.ndarray

    def as_draw(self, uid: int) -> TrainSequence:
        """From the first token to the last one that carries loss, with ``uid`` as prompt key."""
        learned = np.flatnonzero(self.loss_mask)
        first, end = int(learned[0]), int(learned[-1]) + 1
        mask = self.loss_mask[first:end]
        return TrainSequence(
            prompt_key=uid,
            prompt_ids=tuple(self.token_ids[:first].tolist()),
            response_ids=tuple(self.token_ids[first:end].tolist()),
            loss_mask=None if mask.all() else tuple(mask.tolist()),
        )


SftSource = Source[TrainSequence]
"""Training examples in the ledger's order; ``TrainSequence.prompt_key`` is the uid of the draw."""


def open_sft_source(
    examples: Sequence[SftExample], config: SftDataConfig, *, total_epochs: int
) -> SftSource:
    """A source at its beginning. Raises UserError if the examples do not fill one batch."""
    order = LedgerOrder(
        num_rows=len(examples),
        batch_size=config.train_batch_size,
        shuffle=config.shuffle,
        seed=config.seed,
        fingerprint=fingerprint(
            example.token_ids.tobytes() + example.loss_mask.tobytes() for example in examples
        ),
    )
    return Source(examples, Ledger(order, total_epochs=total_epochs))


def validation_sequences(examples: Sequence[SftExample]) -> list[TrainSequence]:
    """Every example once, in row order, keyed by its row."""
    return [example.as_draw(example.row) for example in examples]


def load_sft_examples(
    config: SftDataConfig, codec: TextCodec, *, validation: bool = False
) -> list[SftExample]:
    """Read, check, render and tokenise the training or the validation examples.

    Single-turn: the chat template of the prompt with generation prompt, then the response and the
    end-of-sequence token; without a chat template the prompt as it is. Multi-turn: the whole
    conversation, learning every assistant turn.

    Raises:
        UserError: a file cannot be read, a row lacks what it needs, the template refuses it or
            renders its turns differently once others follow, or it is longer than ``max_length``
            with ``truncation=error``.
    """
    used = read_used_rows(config, validation=validation)
    pieces_of = _conversation if config.multiturn.enable else _prompt_and_response
    pieces: dict[int, list[TextPiece]] = {}
    for number, row in used.rows.items():
        try:
            pieces[number] = pieces_of(row, config, codec=codec)
        except RowFault as fault:
            raise used.source.fault(number, str(fault)) from fault
    examples = [
        _fitting(example, config, source=used.source) for example in _tokenise(pieces, codec)
    ]
    return _with_loss(examples, used.source)


def _prompt_and_response(row: Row, config: SftDataConfig, *, codec: TextCodec) -> list[TextPiece]:
    prompt = _field(row, config.prompt_key, dict_keys=config.prompt_dict_keys)
    response = _field(row, config.response_key, dict_keys=config.response_dict_keys)
    if not isinstance(response, str):
        raise RowFault(f"has a response that is not text under {config.response_key!r}. Mend it.")
    answer = TextPiece(response + codec.eos_text, carries_loss=True)
    if isinstance(prompt, str) and not codec.has_chat_template:
        return [TextPiece(prompt, carries_loss=False, plain=True), answer]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not is_chat(chat):
        raise RowFault("has a prompt that is neither text nor a list of {role, content}. Mend it.")
    return [TextPiece(_render(chat, codec, generation_prompt=True), carries_loss=False), answer]


def _conversation(row: Row, config: SftDataConfig, *, codec: TextCodec) -> list[TextPiece]:
    """Each assistant turn with what stands before it; what follows the last one teaches nothing."""
    messages = row.get(config.multiturn.messages_key)
    if not is_chat(messages):
        raise RowFault(
            "has no list of {role, content} under "
            f"data.multiturn.messages_key={config.multiturn.messages_key!r}. Mend or remove it."
        )
    pieces: list[TextPiece] = []
    done = ""
    for i in _assistant_turns(messages):
        before = _render(messages[:i], codec, generation_prompt=True)
        after = _render(messages[: i + 1], codec, generation_prompt=False)
        if not (before.startswith(done) and after.startswith(before)):
            raise RowFault(
                f"cannot be cut into turns: the chat template renders what precedes message {i} "
                "differently once it follows. Use a template that keeps earlier turns as they were."
            )
        pieces.append(TextPiece(before[len(done) :], carries_loss=False))
        pieces.append(TextPiece(after[len(before) :], carries_loss=True))
        done = after
    return pieces


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns or turns[0] == 0:
        raise RowFault("must have an assistant message, and another one before it. Mend it.")
    return turns


def _field(row: Row, key: str, *, dict_keys: Sequence[str]) -> Any:
    """``row[key]``, then further into it by ``dict_keys``."""
    value: Any = row.get(key)
    for inner in dict_keys:
        value = value.get(inner) if isinstance(value, dict) else None
    if not value:
        raise RowFault(f"has nothing under {'.'.join([key, *dict_keys])!r}. Mend or remove it.")
    return value


def _render(chat: Sequence[Message], codec: TextCodec, *, generation_prompt: bool) -> str:
    try:
        return codec.render([chat], generation_prompt=generation_prompt)[0]
    except ChatRefused as error:
        raise RowFault(str(error)) from error


def _tokenise(pieces: Mapping[int, Sequence[TextPiece]], codec: TextCodec) -> list[SftExample]:
    flat = list(chain.from_iterable(pieces.values()))
    encoded = iter(codec.encode([p.text for p in flat], plain=[p.plain for p in flat]))
    examples: list[SftExample] = []
    for row, parts in pieces.items():
        ids = [next(encoded) for _ in parts]
        learned = [part.carries_loss for part in parts]
        mask = np.repeat(learned, [len(part_ids) for part_ids in ids])
        token_ids = np.fromiter(chain.from_iterable(ids), dtype=np.int32)
        examples.append(SftExample(row, token_ids, mask))
    return examples


def _fitting(example: SftExample, config: SftDataConfig, *, source: RowSource) -> SftExample:
    limit, length, side = config.max_length, len(example.token_ids), config.truncation
    if length > limit and side == "error":
        raise source.fault(
            example.row,
            f"has {length} tokens, more than data.max_length={limit}, and data.truncation='error'. "
            "Raise data.max_length, or set data.truncation to left, right or middle.",
        )
    loss_mask = truncate(example.loss_mask, limit, side=side).copy()
    loss_mask[:1] = False  # nothing predicts the first token
    return SftExample(example.row, truncate(example.token_ids, limit, side=side), loss_mask)


def _with_loss(examples: list[SftExample], source: RowSource) -> list[SftExample]:
    kept = [example for example in examples if example.loss_mask.any()]
    if len(kept) < len(examples):
        logger.warning(
            "%s: dropped %d of %d examples, of which truncation left nothing to learn",
            source.key,
            len(examples) - len(kept),
            len(examples),
        )
    if examples and not kept:
        raise UserError(
            f"{source.key}={list(source.files)}: truncation leaves nothing to learn of any row. "
            "Raise data.max_length."
        )
    return kept
