# SPDX-License-Identifier: Apache-2.0
"""Prompts: rows of verl's schema, checked, filtered and ready to be drawn.

Every row is checked before training starts. All are rendered and tokenised then too, or of a large
data set the longest ones, and the others when they are drawn. An error names the file and the
number of the row.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.images import PictureRule, require_no_pictures
from tandem.data.ledger import Source
from tandem.data.prompt_lengths import kept_lengths
from tandem.data.rendering import (
    CHUNK_ROWS,
    AgentRule,
    PromptEntry,
    PromptReader,
    PromptRow,
)
from tandem.data.seeing import see_rows
from tandem.data.selection import UsedRows, read_used_rows
from tandem.data.tokenizer import Chat, TextCodec, is_chat
from tandem.errors import UserError
from tandem.types import Prompt

logger = logging.getLogger(__name__)

LARGE_ROWS = 20_000
"""The number of rows above which prompts are rendered when they are drawn."""

NO_SOURCE = "custom"
"""The data source of rows without one."""
_NAMED_COLUMNS = ("ground_truth", "reward_model", "extra_info")
_COLUMNS_PAGE = "docs/data.md lists the columns, with a converter of ten lines."


PromptSource = Source[Prompt]
"""The training prompts in the order of the ledger."""


def load_prompts(
    config: DataConfig,
    codec: TextCodec,
    *,
    validation: bool = False,
    by_model: bool = False,
    by_function: bool = False,
    agents: AgentRule | None = None,
    pictures: PictureRule | None = None,
) -> list[PromptEntry]:
    """Read, check, render, tokenise, filter and truncate the training or the validation prompts.

    The chat template is applied to prompts that are lists of messages; plain strings are used
    unchanged. Without validation files the result is empty.

    Args:
        by_model: whether a reward model scores training. Training rows then need no ground truth,
            and validation skips the rows that only a model can score.
        by_function: whether functions of the user score rows instead of rules. Rows then need
            neither ground truth nor data source.
        agents: the agents of the run; None for single turns only.
        pictures: how the model reads pictures; None for a model of text.

    Raises:
        UserError: a file cannot be read, a row lacks its prompt or what its rule needs, the chat
            template refuses a row, a prompt is too long with ``truncation=error``, or no prompt is
            short enough.
    """
    checked = _read_rows(
        config,
        codec,
        validation=validation,
        by_model=by_model,
        by_function=by_function,
        agents=agents,
        pictures=pictures,
    )
    return _load_all(config, checked)


@dataclass(frozen=True, slots=True)
class TrainingPrompts:
    """The training prompts.

    Attributes:
        rows: all rows that can be drawn.
        examples: the prompts that were rendered and tokenised at the start: all, or those of the
            longest rows of a large data set.
        read: returns the prompts at these indices of ``rows``.
    """

    rows: Sequence[PromptRow | PromptEntry]
    examples: Sequence[PromptEntry]
    read: Callable[[Sequence[int]], Sequence[PromptEntry]]


def open_prompts(
    config: DataConfig,
    codec: TextCodec,
    *,
    by_model: bool = False,
    by_function: bool = False,
    agents: AgentRule | None = None,
    pictures: PictureRule | None = None,
) -> TrainingPrompts:
    """Read and check the training prompts. Those of large data sets are rendered when drawn.

    With ``data.filter_overlong_prompts`` all prompts are measured first, in any case. Arguments and
    errors are those of ``load_prompts``; of a large data set, ``read`` raises those of a prompt.
    """
    with _no_collection():
        checked = _read_rows(
            config,
            codec,
            validation=False,
            by_model=by_model,
            by_function=by_function,
            agents=agents,
            pictures=pictures,
        )
        # Tokens of pictures are numbered in the order of all rows, so that none can be left out.
        if len(checked.rows) <= LARGE_ROWS or pictures is not None:
            entries = _load_all(config, checked)
            return TrainingPrompts(entries, entries, lambda drawn: [entries[i] for i in drawn])
        rows, reader = _measured(config, codec, checked=checked), checked.reader
        gc.freeze()  # no later collection looks at the rows, which stay to the end
    sizes = np.fromiter((row.num_characters for row in rows), dtype=np.int64, count=len(rows))
    longest = np.sort(np.argsort(sizes, kind="stable")[-CHUNK_ROWS:])
    examples = reader.read([rows[index] for index in longest])
    logger.info(
        "%s: %d prompts are rendered and tokenised when they are drawn; the %d longest were "
        "checked now",
        checked.used.source.key,
        len(rows),
        len(examples),
    )
    return TrainingPrompts(rows, examples, lambda drawn: reader.read([rows[i] for i in drawn]))


@dataclass(frozen=True, slots=True)
class _Checked:
    """Rows that are checked, and what renders them."""

    used: UsedRows
    rows: list[PromptRow]
    reader: PromptReader
    has_tools: bool


def _read_rows(
    config: DataConfig,
    codec: TextCodec,
    *,
    validation: bool,
    by_model: bool,
    by_function: bool,
    agents: AgentRule | None,
    pictures: PictureRule | None,
) -> _Checked:
    used = read_used_rows(config, validation=validation)
    if by_model and validation:
        used = _with_rules(used)
    by_rule = not by_function and (validation or not by_model)
    rule = agents or AgentRule()
    rows: list[PromptRow] = []
    for number, row in used.rows.items():
        try:
            _check(row, config, by_rule=by_rule and not rule.gives_reward(row))
            agent = rule.agent_of(row, prompt=row[config.prompt_key])
            if pictures is None:
                require_no_pictures(row, (config.image_key,))
        except RowFault as fault:
            raise used.source.fault(number, fault) from fault
        rows.append(
            PromptRow(
                row=number,
                data_source=row.get(config.reward_fn_key) or NO_SOURCE,
                ground_truth=_truth_of(row),
                extra_info=_extra_info_of(row, config),
                messages=row[config.prompt_key],
                agent=agent,
            )
        )
    seen = None
    if pictures is not None:
        answered_by = {row.row: row.agent for row in rows}
        seen = see_rows(used, config, rule=pictures, agents=answered_by, validation=validation)
    _warn_of_forms(rows, codec, source=used.source)
    if by_function:
        _warn_of_some_without_truth(rows, used.source)
    reader = PromptReader(config, codec, source=used.source, rule=rule, seen=seen)
    return _Checked(used, rows, reader, has_tools=bool(rule.schemas))


def _load_all(config: DataConfig, checked: _Checked) -> list[PromptEntry]:
    entries = checked.reader.render(checked.rows)
    _tell_of_pictures(entries, checked.used.source)
    if config.filter_overlong_prompts and entries:
        lengths = np.array([len(entry.token_ids) for entry in entries], dtype=np.int32)
        kept = _short_enough(lengths, config.max_prompt_length, source=checked.used.source)
        entries = [entries[index] for index in kept]
    return [checked.reader.fitted(entry) for entry in entries]


def _measured(config: DataConfig, codec: TextCodec, *, checked: _Checked) -> list[PromptRow]:
    """Return the rows of a large data set without those that are too long, if they are left out."""
    if not config.filter_overlong_prompts:
        return checked.rows
    key = None if checked.has_tools else codec.rendering_digest()
    lengths = kept_lengths(checked.rows, checked.reader.lengths, key=key)
    kept = _short_enough(lengths, config.max_prompt_length, source=checked.used.source)
    return [checked.rows[index] for index in kept]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turn the garbage collector off: a million rows are many objects and no garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _tell_of_pictures(entries: Sequence[PromptEntry], source: RowSource) -> None:
    """Log how many tokens the pictures of prompts have, as they often decide the length."""
    tokens = [picture.num_tokens for entry in entries for picture in entry.pictures]
    if tokens:
        logger.info(
            "%s: %d pictures of %.0f tokens in the mean, the largest of %d",
            source.key,
            len(tokens),
            sum(tokens) / len(tokens),
            max(tokens),
        )


def _warn_of_forms(rows: Sequence[PromptRow], codec: TextCodec, *, source: RowSource) -> None:
    """Warn of prompts that the model sees in another form than their authors may expect."""
    num_plain = sum(isinstance(row.messages, str) for row in rows)
    if num_plain and codec.has_chat_template:
        logger.warning(
            "%s: %d of %d prompts are text, to which the chat template is not applied; it is "
            "applied to lists of {role, content}",
            source.key,
            num_plain,
            len(rows),
        )
    num_answered = sum(_ends_with_answer(row.messages) for row in rows)
    if num_answered:
        logger.warning(
            "%s: %d of %d prompts end with a message of the assistant, which is not continued: the "
            "model answers in a new turn after it",
            source.key,
            num_answered,
            len(rows),
        )


def _ends_with_answer(messages: Chat | str) -> bool:
    return not isinstance(messages, str) and messages[-1]["role"] == "assistant"


def _warn_of_some_without_truth(rows: Sequence[PromptRow], source: RowSource) -> None:
    lacking = [row.row for row in rows if row.ground_truth is None]
    if 0 < len(lacking) < len(rows):
        logger.warning(
            "%s: %d of %d rows have no ground truth, the first of them row %d",
            source.key,
            len(lacking),
            len(rows),
            lacking[0],
        )


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


def _truth_of(row: Row) -> Any:
    """Return ``reward_model.ground_truth``, or a column ``ground_truth`` of its own."""
    truth = _reward_of(row).get("ground_truth")
    return row.get("ground_truth") if truth is None else truth


def _extra_info_of(row: Row, config: DataConfig) -> Row:
    """Return ``extra_info``, with all columns of a row that is not of verl's schema."""
    given = row.get("extra_info") or {}
    if row.get("reward_model"):
        return given
    named = {config.prompt_key, config.reward_fn_key, config.image_key, *_NAMED_COLUMNS}
    others = {name: value for name, value in row.items() if name not in named}
    return others | given if others else given


def _lack(row: Row, column: str, *, rule: str, also: str = "") -> RowFault:
    """Return the fault of a row without a value, which names its columns if it lacks the column."""
    if column in row:
        return RowFault(rule)
    return RowFault(f"{rule}; its columns are {', '.join(row)}", f"{also}{_COLUMNS_PAGE}")


def _check(row: Row, config: DataConfig, *, by_rule: bool) -> None:
    prompt = row.get(config.prompt_key)
    if not prompt:
        rule = f"has no prompt under data.prompt_key={config.prompt_key!r}"
        raise _lack(row, config.prompt_key, rule=rule, also="Set data.prompt_key to its column. ")
    if not isinstance(prompt, str) and not is_chat(prompt):
        rule = "has a prompt that is neither text nor a list of {role, content}"
        raise RowFault(rule)
    own = "With custom_reward_function.path, no row needs one. "
    if by_rule and _truth_of(row) is None:
        raise _lack(row, "reward_model", rule="has no reward_model.ground_truth", also=own)
    source = row.get(config.reward_fn_key)
    if by_rule and not isinstance(source, str) or not isinstance(source, str | None):
        rule = f"has no data source under data.reward_fn_key={config.reward_fn_key!r}"
        raise _lack(row, config.reward_fn_key, rule=f"{rule}, which must be text", also=own)
    if not isinstance(row.get("extra_info"), dict | None):
        raise RowFault("has an extra_info that is not a mapping")


def _short_enough(lengths: np.ndarray, limit: int, *, source: RowSource) -> list[int]:
    """Return the indices of the prompts that are not too long. Raise UserError if none is left."""
    kept = np.flatnonzero(lengths <= limit).tolist()
    logger.info(
        "%s: kept %d of %d prompts, dropped %d longer than data.max_prompt_length=%d",
        source.key,
        len(kept),
        len(lengths),
        len(lengths) - len(kept),
        limit,
    )
    if not kept:
        raise UserError(
            "data.max_prompt_length",
            limit,
            rule=f"every prompt of {source.key} is longer; the shortest has {min(lengths)} tokens",
            remedy="Raise data.max_prompt_length.",
        )
    return kept
