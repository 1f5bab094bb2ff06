# SPDX-License-Identifier: Apache-2.0
"""Rows of verl's schema to rendered, tokenised prompts, and the source training draws them from.

Guarantees: every row is checked, rendered and measured before training starts, so that a bad row
is a one-line error naming its file and number and never a surprise in mid-run. Not here: which row
is drawn when (``ledger``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.ledger import Ledger, LedgerOrder, fingerprint
from tandem.data.selection import UsedRows, read_used_rows, truncate
from tandem.data.source import Source
from tandem.data.tokenizer import Chat, ChatRefused, TextCodec, is_chat
from tandem.errors import UserError
from tandem.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEntry:
    """One usable prompt of a data set.

    Attributes:
        row: number of its row within all files together.
        data_source, ground_truth, extra_info: as in ``Prompt``.
        messages: the prompt as the row has it.
        text: the same rendered.
        token_ids: int32 (prompt length,); a tuple would take ten times the room.
    """

    row: int
    data_source: str
    ground_truth: Any
    extra_info: Row
    messages: Chat | str
    text: str
    token_ids: np.ndarray

    def as_draw(self, uid: int) -> Prompt:
        """This prompt as draw ``uid``."""
        return Prompt(
            uid=uid,
            row=self.row,
            token_ids=tuple(self.token_ids.tolist()),
            text=self.text,
            data_source=self.data_source,
            ground_truth=self.ground_truth,
            extra_info=self.extra_info,
            messages=self.messages,
        )


PromptSource = Source[Prompt]
"""Training prompts in the ledger's order."""


def open_source(
    entries: Sequence[PromptEntry], config: DataConfig, *, total_epochs: int
) -> PromptSource:
    """A source at its beginning. Raises UserError if the entries do not fill one batch."""
    order = LedgerOrder(
        num_rows=len(entries),
        batch_size=config.train_batch_size,
        shuffle=config.shuffle,
        seed=config.seed,
        fingerprint=fingerprint(_content(entry) for entry in entries),
    )
    return Source(entries, Ledger(order, total_epochs=total_epochs))


def _content(entry: PromptEntry) -> bytes:
    return json.dumps([entry.messages, entry.ground_truth], default=str).encode()


def validation_prompts(entries: Sequence[PromptEntry]) -> list[Prompt]:
    """Every prompt once, in row order, with the number of its row as uid."""
    return [entry.as_draw(entry.row) for entry in entries]


def load_prompts(
    config: DataConfig, codec: TextCodec, *, validation: bool = False, by_model: bool = False
) -> list[PromptEntry]:
    """Read, check, render, tokenise, filter and truncate the training or the validation prompts.

    A prompt is a list of messages, to which the chat template is applied, or a plain string, which
    is taken as it is. Without validation files the result is empty.

    Args:
        by_model: a reward model scores training, so that its rows need no ground truth; validation
            leaves out those that only a model can score.

    Raises:
        UserError: a file cannot be read, a row lacks its prompt, ground truth or data source, the
            chat template refuses a row, a prompt is too long with ``truncation=error``, or
            filtering leaves nothing.
    """
    used = read_used_rows(config, validation=validation)
    if by_model and validation:
        used = _with_rules(used)
    for number, row in used.rows.items():
        try:
            _check(row, config, needs_truth=validation or not by_model)
        except RowFault as fault:
            raise used.source.fault(number, str(fault)) from fault
    chats = {number: row[config.prompt_key] for number, row in used.rows.items()}
    texts = _render(chats, codec, source=used.source)
    plain = [isinstance(chat, str) for chat in chats.values()]
    entries = [
        PromptEntry(
            row=number,
            data_source=row[config.reward_fn_key],
            ground_truth=_reward_of(row).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
            messages=chats[number],
            text=text,
            token_ids=np.array(ids, dtype=np.int32),
        )
        for (number, row), text, ids in zip(
            used.rows.items(), texts, codec.encode(texts, plain=plain), strict=True
        )
    ]
    if config.filter_overlong_prompts and entries:
        entries = _short_enough(entries, config.max_prompt_length, source=used.source)
    return [_fitting(entry, config, source=used.source) for entry in entries]


def _with_rules(used: UsedRows) -> UsedRows:
    """The rows whose reward is not left to a model."""
    rows = {n: row for n, row in used.rows.items() if _reward_of(row).get("style") != "model"}
    num_left_out = len(used.rows) - len(rows)
    if num_left_out:
        logger.warning(
            "%s: %d of %d rows have reward_model.style=model: they have no score in validations, "
            "which rules and functions make, and are left out",
            used.source.key,
            num_left_out,
            len(used.rows),
        )
    return replace(used, rows=rows)


def _reward_of(row: Row) -> Row:
    found = row.get("reward_model")
    return found if isinstance(found, dict) else {}


def _check(row: Row, config: DataConfig, *, needs_truth: bool) -> None:
    prompt = row.get(config.prompt_key)
    if not prompt:
        raise RowFault(f"has no prompt under data.prompt_key={config.prompt_key!r}. Mend it.")
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise RowFault("has a prompt that is neither text nor a list of {role, content}. Mend it.")
    if needs_truth and _reward_of(row).get("ground_truth") is None:
        raise RowFault("has no reward_model.ground_truth. Mend or remove it.")
    if not isinstance(row.get(config.reward_fn_key), str):
        raise RowFault(
            f"has no data source under data.reward_fn_key={config.reward_fn_key!r}, which must be "
            "text. Mend it."
        )
    if not isinstance(row.get("extra_info"), dict | None):
        raise RowFault("has an extra_info that is no mapping. Mend or remove it.")


def _render(chats: Mapping[int, Chat | str], codec: TextCodec, *, source: RowSource) -> list[str]:
    templated = {row: chat for row, chat in chats.items() if not isinstance(chat, str)}
    try:
        rendered = iter(codec.render(list(templated.values())))
    except ChatRefused as error:
        raise source.fault(list(templated)[error.position], str(error)) from error
    return [chat if isinstance(chat, str) else next(rendered) for chat in chats.values()]


def _short_enough(
    entries: list[PromptEntry], limit: int, *, source: RowSource
) -> list[PromptEntry]:
    kept = [entry for entry in entries if len(entry.token_ids) <= limit]
    logger.info(
        "%s: kept %d of %d prompts, dropped %d longer than data.max_prompt_length=%d",
        source.key,
        len(kept),
        len(entries),
        len(entries) - len(kept),
        limit,
    )
    if not kept:
        shortest = min(len(entry.token_ids) for entry in entries)
        raise UserError(
            f"data.max_prompt_length={limit}: every prompt of {source.key} is longer, the shortest "
            f"has {shortest} tokens. Raise data.max_prompt_length."
        )
    return kept


def _fitting(entry: PromptEntry, config: DataConfig, *, source: RowSource) -> PromptEntry:
    limit, length = config.max_prompt_length, len(entry.token_ids)
    if length == 0:
        raise source.fault(entry.row, "has a prompt without tokens. Mend or remove it.")
    if length <= limit:
        return entry
    if config.truncation == "error":
        raise source.fault(
            entry.row,
            f"has a prompt of {length} tokens, more than data.max_prompt_length={limit}, and "
            "data.truncation='error'. Set data.filter_overlong_prompts=True, raise "
            "data.max_prompt_length, or set data.truncation to left, right or middle.",
        )
    return replace(entry, token_ids=truncate(entry.token_ids, limit, side=config.truncation))
