# SPDX-License-Identifier: Apache-2.0
"""Prompts: rows of verl's schema, rendered and tokenised.

Every row is checked, rendered and measured before training starts. An error names the file and the
number of the row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.ledger import Source
from tandem.data.selection import UsedRows, read_used_rows, truncate
from tandem.data.tokenizer import Chat, ChatRefused, TextCodec, is_chat
from tandem.errors import UserError
from tandem.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PromptEntry:
    """A usable prompt of a data set; implements ``ledger.Entry``.

    Attributes:
        row: the number of its row, counted over all files.
        data_source, ground_truth, extra_info, messages, text: as in ``Prompt``.
        token_ids: int32 (prompt length,); a tuple would need ten times the memory.
    """

    row: int
    data_source: str
    ground_truth: Any
    extra_info: Row
    messages: Chat | str
    text: str
    token_ids: np.ndarray

    @property
    def content(self) -> bytes:
        return json.dumps([self.messages, self.ground_truth], default=str).encode()

    def as_draw(self, uid: int) -> Prompt:
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
"""The training prompts in the order of the ledger."""


def load_prompts(
    config: DataConfig, codec: TextCodec, *, validation: bool = False, by_model: bool = False
) -> list[PromptEntry]:
    """Read, check, render, tokenise, filter and truncate the training or the validation prompts.

    The chat template is applied to prompts that are lists of messages; plain strings are used
    unchanged. Without validation files the result is empty.

    Args:
        by_model: whether a reward model scores training. Training rows then need no ground truth,
            and validation skips the rows that only a model can score.

    Raises:
        UserError: a file cannot be read, a row lacks its prompt, ground truth or data source, the
            chat template refuses a row, a prompt is too long with ``truncation=error``, or no
            prompt is short enough.
    """
    used = read_used_rows(config, validation=validation)
    if by_model and validation:
        used = _with_rules(used)
    for number, row in used.rows.items():
        try:
            _check(row, config, needs_truth=validation or not by_model)
        except RowFault as fault:
            raise used.source.fault(number, fault) from fault
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
    """Return ``used`` without the rows that only a reward model can score."""
    rows = {n: row for n, row in used.rows.items() if _reward_of(row).get("style") != "model"}
    num_left_out = len(used.rows) - len(rows)
    if num_left_out:
        logger.warning(
            "%s: skipped %d of %d rows, which have reward_model.style=model, because rules and "
            "functions score validations",
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
        rule = f"has no prompt under data.prompt_key={config.prompt_key!r}"
        raise RowFault(rule)
    if not isinstance(prompt, str) and not is_chat(prompt):
        rule = "has a prompt that is neither text nor a list of {role, content}"
        raise RowFault(rule)
    if needs_truth and _reward_of(row).get("ground_truth") is None:
        raise RowFault("has no reward_model.ground_truth")
    if not isinstance(row.get(config.reward_fn_key), str):
        rule = f"has no data source under data.reward_fn_key={config.reward_fn_key!r}"
        raise RowFault(f"{rule}, which must be text")
    if not isinstance(row.get("extra_info"), dict | None):
        raise RowFault("has an extra_info that is not a mapping")


def _render(chats: Mapping[int, Chat | str], codec: TextCodec, *, source: RowSource) -> list[str]:
    templated = {row: chat for row, chat in chats.items() if not isinstance(chat, str)}
    try:
        rendered = iter(codec.render(list(templated.values())))
    except ChatRefused as error:
        fault = RowFault(str(error))
        raise source.fault(list(templated)[error.position], fault) from error
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
            "data.max_prompt_length",
            limit,
            rule=f"every prompt of {source.key} is longer; the shortest has {shortest} tokens",
            remedy="Raise data.max_prompt_length.",
        )
    return kept


def _fitting(entry: PromptEntry, config: DataConfig, *, source: RowSource) -> PromptEntry:
    limit, length = config.max_prompt_length, len(entry.token_ids)
    if length == 0:
        fault = RowFault("has a prompt without tokens")
        raise source.fault(entry.row, fault)
    if length <= limit:
        return entry
    if config.truncation == "error":
        fault = RowFault(
            f"has a prompt of {length} tokens, more than data.max_prompt_length={limit}, and "
            "data.truncation='error'",
            "Set data.filter_overlong_prompts=True, raise data.max_prompt_length, or set "
            "data.truncation to left, right or middle.",
        )
        raise source.fault(entry.row, fault)
    return replace(entry, token_ids=truncate(entry.token_ids, limit, side=config.truncation))
