# SPDX-License-Identifier: Apache-2.0
"""Supervised examples: rows of single-turn or multi-turn conversations, rendered and tokenised.

The tokens that the model itself would generate carry loss: the response and its end, or every
assistant turn after its generation prompt. Every row is checked before training starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np

from tandem.config.schema.sft import MultiturnConfig, SftDataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.images import PIXELS_KEY, PictureRule, PictureSource, ids_of_text
from tandem.data.ledger import Source
from tandem.data.packing import TrainSequence
from tandem.data.seeing import RowPictures, expand_example, require_whole
from tandem.data.selection import read_used_rows, truncate
from tandem.data.tokenizer import NO_SETTINGS, ChatRefused, Message, TextCodec, is_chat
from tandem.errors import UserError

logger = logging.getLogger(__name__)

_TRUNCATED = "set data.truncation to left, right or middle"
Mark = Callable[[Any], Any]
"""A function that puts the model's own text in place of the marks of pictures."""


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of text that is tokenised on its own, because the model generates from its end.

    ``plain``: whether the tokenizer adds special tokens; rendered templates have them already.
    """

    text: str
    carries_loss: bool
    plain: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SftExample:
    """A supervised example; implements ``ledger.Entry``.

    Attributes:
        row: the number of its row, counted over all files.
        token_ids: int32 (length,).
        loss_mask: whether a token carries loss, bool (length,); False for the first token.
        pictures: the pictures that its tokens name; they are decoded when it is drawn.
    """

    row: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    pictures: tuple[PictureSource, ...] = ()

    @property
    def text_ids(self) -> np.ndarray:
        """The tokens that are not of pictures."""
        return ids_of_text(self.token_ids, self.pictures)

    @property
    def content(self) -> bytes:
        arrays = self.token_ids.tobytes() + self.loss_mask.tobytes()
        return b"".join([arrays, *(picture.content for picture in self.pictures)])

    def as_draw(self, uid: int) -> TrainSequence:
        """Return the tokens up to the last one that carries loss, with ``uid`` as prompt key."""
        learned = np.flatnonzero(self.loss_mask)
        first, end = int(learned[0]), int(learned[-1]) + 1
        mask = self.loss_mask[first:end]
        return TrainSequence(
            prompt_key=uid,
            prompt_ids=tuple(self.token_ids[:first].tolist()),
            response_ids=tuple(self.token_ids[first:end].tolist()),
            loss_mask=None if mask.all() else tuple(mask.tolist()),
            pictures=tuple(picture.read() for picture in self.pictures),
        )


SftSource = Source[TrainSequence]
"""The training examples in the order of the ledger; ``prompt_key`` is the uid of the draw."""


def load_sft_examples(
    config: SftDataConfig,
    codec: TextCodec,
    *,
    validation: bool = False,
    pictures: PictureRule | None = None,
) -> list[SftExample]:
    """Read, check, render and tokenise the training or the validation examples.

    A single-turn example is the rendered prompt with its generation prompt, then the response and
    the end-of-sequence token; without a chat template the prompt is used unchanged. A multi-turn
    example is the whole conversation, in which every assistant turn carries loss.

    Args:
        pictures: how the model reads pictures; None for a model of text.

    Raises:
        UserError: a file cannot be read, a row lacks a field, the template refuses a row or renders
            a turn differently when others follow, or a row is longer than ``max_length`` with
            ``truncation=error``.
    """
    used = read_used_rows(config, validation=validation)
    pieces_of = _conversation if config.multiturn.enable else _prompt_and_response
    pieces: dict[int, list[TextPiece]] = {}
    seen = RowPictures(used.source, config.image_key, rule=pictures, validation=validation)
    for number, row in used.rows.items():
        try:
            seen.begin(number, row)
            pieces[number] = pieces_of(row, config, codec=codec, mark=seen.mark)
            if seen.pictures.get(number) and config.truncation != "error":
                rule = f"has pictures, which data.truncation={config.truncation} could cut"
                raise RowFault(rule, "Set data.truncation=error.")
        except RowFault as fault:
            raise used.source.fault(number, fault) from fault
    require_whole(seen.pictures, used.source)
    examples = [
        _fitting(_expanded(example, seen), config, source=used.source)
        for example in _tokenise(pieces, codec)
    ]
    return _with_loss(examples, used.source)


def _expanded(example: SftExample, seen: RowPictures) -> SftExample:
    """Return an example with the tokens of its pictures, which carry no loss."""
    pictures = seen.pictures.get(example.row, ())
    if seen.rule is None:
        return example
    try:
        token_ids, loss_mask = expand_example(
            example.token_ids, example.loss_mask, pictures=pictures, rule=seen.rule
        )
    except RowFault as fault:
        raise seen.source.fault(example.row, fault) from fault
    return SftExample(example.row, token_ids, loss_mask, pictures)


def _prompt_and_response(
    row: Row, config: SftDataConfig, *, codec: TextCodec, mark: Mark
) -> list[TextPiece]:
    prompt = _field(row, "prompt", key=config.prompt_key, dict_keys=config.prompt_dict_keys)
    if not isinstance(prompt, str) and not is_chat(prompt):
        rule = "has a prompt that is neither text nor a list of {role, content}"
        raise RowFault(rule)
    prompt = mark(prompt)
    response = _field(row, "response", key=config.response_key, dict_keys=config.response_dict_keys)
    if not isinstance(response, str):
        rule = f"has under {config.response_key!r} a response that is not text"
        raise RowFault(rule)
    answer = TextPiece(response + codec.eos_text, carries_loss=True)
    if isinstance(prompt, str) and not codec.has_chat_template:
        return [TextPiece(prompt, carries_loss=False, plain=True), answer]
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [TextPiece(_render(chat, codec, generation_prompt=True), carries_loss=False), answer]


def _conversation(
    row: Row, config: SftDataConfig, *, codec: TextCodec, mark: Mark
) -> list[TextPiece]:
    """Return the pieces up to the last assistant turn: each turn, and the text before it."""
    messages = row.get(config.multiturn.messages_key)
    if not is_chat(messages):
        key = config.multiturn.messages_key
        rule = f"has no list of {{role, content}} under data.multiturn.messages_key={key!r}"
        if key in row:
            raise RowFault(rule)
        rule += f"; its columns are {', '.join(row)}"
        raise RowFault(rule, "Set data.multiturn.messages_key to the column of the conversation.")
    messages = mark(messages)
    settings = _template_settings(row, config.multiturn)
    pieces: list[TextPiece] = []
    done = ""
    for i in _assistant_turns(messages):
        before = _prompt_before(messages, i, codec=codec, settings=settings)
        after = _render(messages[: i + 1], codec, generation_prompt=False, settings=settings)
        if not (before.startswith(done) and after.startswith(before)):
            raise RowFault(
                "cannot be cut into turns: the chat template renders the messages before message "
                f"{i} differently when it follows",
                "Use a template that keeps earlier turns unchanged.",
            )
        pieces.append(TextPiece(before[len(done) :], carries_loss=False))
        pieces.append(TextPiece(after[len(before) :], carries_loss=True))
        done = after
    return pieces


def _assistant_turns(messages: Sequence[Message]) -> list[int]:
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        rule = "must have an assistant message"
        raise RowFault(rule)
    return turns


def _prompt_before(
    messages: Sequence[Message], turn: int, *, codec: TextCodec, settings: Mapping[str, Any]
) -> str:
    """Return the text from which the model generates message number ``turn``."""
    if turn:
        return _render(messages[:turn], codec, generation_prompt=True, settings=settings)
    # Many templates refuse a conversation without messages, hence the difference of two texts.
    alone, prompted = (
        _render(messages[:1], codec, generation_prompt=asks, settings=settings)
        for asks in (False, True)
    )
    prompt = prompted.removeprefix(alone)
    start = alone.find(prompt)
    if not prompt or prompt == prompted or start < 0:
        raise RowFault(
            "begins with an assistant message, and the chat template does not show where its "
            "answer begins",
            "Put another message before it.",
        )
    return alone[: start + len(prompt)]


def _template_settings(row: Row, config: MultiturnConfig) -> dict[str, Any]:
    """Return the arguments of the chat template that belong to a row."""
    settings: dict[str, Any] = {}
    tools = _given(row.get(config.tools_key))
    if tools:
        settings["tools"] = tools
    thinking = row.get(config.enable_thinking_key)
    thinking = config.enable_thinking_default if thinking is None else bool(thinking)
    if thinking is not None:
        settings["enable_thinking"] = thinking
    return settings


def _given(value: Any) -> Any:
    # Parquet fills fields that a row lacks with None; a template must not see these.
    if isinstance(value, dict):
        fields = cast(dict[str, Any], value)
        return {name: _given(entry) for name, entry in fields.items() if entry is not None}
    return [_given(entry) for entry in cast(list[Any], value)] if isinstance(value, list) else value


def _field(row: Row, part: str, *, key: str, dict_keys: Sequence[str]) -> Any:
    """Return ``row[key][dict_keys[0]][...]``; ``data.<part>_key`` is ``key``."""
    value: Any = row.get(key)
    for inner in dict_keys:
        value = value.get(inner) if isinstance(value, dict) else None
    if not value:
        rule = f"has no value under {'.'.join([key, *dict_keys])!r}"
        if key in row:
            raise RowFault(rule)
        raise RowFault(
            f"{rule}; its columns are {', '.join(row)}",
            f"Set data.{part}_key to the column of the {part}, or data.multiturn.enable=True for "
            "conversations (docs/data.md).",
        )
    return value


def _render(
    chat: Sequence[Message],
    codec: TextCodec,
    *,
    generation_prompt: bool,
    settings: Mapping[str, Any] = NO_SETTINGS,
) -> str:
    try:
        return codec.render([chat], generation_prompt=generation_prompt, settings=settings)[0]
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
        way = f"lower {PIXELS_KEY}" if example.pictures else _TRUNCATED
        fault = RowFault(
            f"has {length} tokens, more than data.max_length={limit}, and data.truncation='error'",
            f"Raise data.max_length, or {way}.",
        )
        raise source.fault(example.row, fault)
    loss_mask = truncate(example.loss_mask, limit, side=side).copy()
    loss_mask[:1] = False  # nothing predicts the first token
    token_ids = truncate(example.token_ids, limit, side=side)
    return SftExample(example.row, token_ids, loss_mask, example.pictures)


def _with_loss(examples: list[SftExample], source: RowSource) -> list[SftExample]:
    kept = [example for example in examples if example.loss_mask.any()]
    if len(kept) < len(examples):
        logger.warning(
            "%s: dropped %d of %d examples, in which truncation left no token with loss",
            source.key,
            len(examples) - len(kept),
            len(examples),
        )
    if examples and not kept:
        raise UserError(
            source.key,
            list(source.files),
            rule="truncation leaves no token with loss in any row",
            remedy="Raise data.max_length.",
        )
    return kept
