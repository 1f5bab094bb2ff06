# SPDX-License-Identifier: Apache-2.0
"""Prompts: rows of verl's schema, rendered and tokenised.

Every row is checked, rendered and measured before training starts. An error names the file and the
number of the row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.images import (
    PIXELS_KEY,
    PictureRule,
    PictureSource,
    require_no_pictures,
)
from tandem.data.ledger import Source
from tandem.data.seeing import see_rows
from tandem.data.selection import UsedRows, read_used_rows, truncate
from tandem.data.tokenizer import Chat, ChatRefused, TextCodec, is_chat
from tandem.errors import UserError
from tandem.types import Prompt

logger = logging.getLogger(__name__)

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
_TURNS = "actor_rollout_ref.rollout.multi_turn"
NO_SOURCE = "custom"
"""The data source of rows without one."""
_COLUMNS_PAGE = "docs/data.md lists the columns, with a converter of ten lines."


@dataclass(frozen=True, slots=True, eq=False)
class PromptEntry:
    """A usable prompt of a data set; implements ``ledger.Entry``.

    Attributes:
        row: the number of its row, counted over all files.
        data_source, ground_truth, extra_info, messages, text, agent: as in ``Prompt``.
        token_ids: int32 (prompt length,); a tuple would need ten times the memory.
        pictures: the pictures that its tokens name; they are decoded when it is drawn.
    """

    row: int
    data_source: str
    ground_truth: Any
    extra_info: Row
    messages: Chat | str
    text: str
    token_ids: np.ndarray
    agent: str = ""
    pictures: tuple[PictureSource, ...] = ()

    @property
    def text_ids(self) -> np.ndarray:
        """The tokens that are not of pictures."""
        if not self.pictures:
            return self.token_ids
        return self.token_ids[self.token_ids < self.pictures[0].first_id]

    @property
    def content(self) -> bytes:
        text = json.dumps([self.messages, self.ground_truth], default=str).encode()
        return b"".join([text, *(picture.content for picture in self.pictures)])

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
            agent=self.agent,
            pictures=tuple(picture.read() for picture in self.pictures),
        )


@dataclass(frozen=True, slots=True)
class AgentRule:
    """The agents that rows may name, and the tools that their prompts are rendered with.

    Attributes:
        default: the agent of a row without ``agent_name``; "" for a single turn.
        schemas: the schema of each tool by its name.
        has_environment: whether there are tools or simulated users at all.
        programs: the names of the user's own agents, and whether each gives the reward itself.
    """

    default: str = ""
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    has_environment: bool = False
    programs: Mapping[str, bool] = field(default_factory=dict[str, bool])

    def gives_reward(self, row: Row) -> bool:
        """Return whether the agent of a row gives its reward, so that no rule reads the row."""
        return self.programs.get(row.get("agent_name") or self.default, False)

    def agent_of(self, row: Row, *, prompt: Any) -> str:
        """Return the agent of a row; raise RowFault if there is none of its name."""
        named = row.get("agent_name")
        agent = self.default if named is None else named
        if agent in ("", SINGLE_TURN):
            return ""
        if agent != TOOL_AGENT and agent not in self.programs:
            known = ", ".join((SINGLE_TURN, TOOL_AGENT, *self.programs))
            rule = f"names the agent {agent!r}; the agents are {known}"
            raise RowFault(rule, "Correct agent_name.")
        if agent == TOOL_AGENT and not (self.has_environment or agent in self.programs):
            how = "names" if named else "is answered by"
            rule = f"{how} the agent {TOOL_AGENT}, and the run has no tools"
            raise RowFault(rule, f"Set {_TURNS}.tool_config_path or {_TURNS}.function_tool_path.")
        if isinstance(prompt, str):
            rule = "has a prompt that is text, and an agent needs a list of messages"
            raise RowFault(rule)
        return agent

    def settings_of(self, row: Row) -> Mapping[str, Any]:
        """Return the arguments of the chat template for a row of an agent.

        An agent of the user sends its tools with its requests.
        """
        if (row.get("agent_name") or self.default) in self.programs:
            return {}
        selected = (row.get("extra_info") or {}).get("tool_selection")
        tools = [self.schemas[name] for name in self.schemas if not selected or name in selected]
        return {"tools": tools} if tools else {}


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
    used = read_used_rows(config, validation=validation)
    if by_model and validation:
        used = _with_rules(used)
    by_rule = not by_function and (validation or not by_model)
    rule = agents or AgentRule()
    agent_of: dict[int, str] = {}
    for number, row in used.rows.items():
        try:
            _check(row, config, by_rule=by_rule and not rule.gives_reward(row))
            agent_of[number] = rule.agent_of(row, prompt=row[config.prompt_key])
            if pictures is None:
                require_no_pictures(row, (config.image_key,))
        except RowFault as fault:
            raise used.source.fault(number, fault) from fault
    chats = {number: row[config.prompt_key] for number, row in used.rows.items()}
    settings = {n: rule.settings_of(used.rows[n]) for n, agent in agent_of.items() if agent}
    seen = None
    if pictures is not None:
        seen = see_rows(used, config, rule=pictures, agents=agent_of, validation=validation)
    asked = chats if seen is None else seen.chats
    texts = _render(asked, codec, source=used.source, settings=settings)
    plain = [isinstance(chat, str) for chat in chats.values()]
    if any(plain) and codec.has_chat_template:
        _warn_of_text(plain, used.source)
    entries = [
        PromptEntry(
            row=number,
            data_source=row.get(config.reward_fn_key) or NO_SOURCE,
            ground_truth=_truth_of(row),
            extra_info=row.get("extra_info") or {},
            messages=chats[number],
            text=text,
            token_ids=np.array(ids, dtype=np.int32) if seen is None else seen.expand(number, ids),
            agent=agent_of[number],
            pictures=() if seen is None else seen.pictures[number],
        )
        for (number, row), text, ids in zip(
            used.rows.items(), texts, codec.encode(texts, plain=plain), strict=True
        )
    ]
    if by_function:
        _warn_of_some_without_truth(entries, used.source)
    if config.filter_overlong_prompts and entries:
        entries = _short_enough(entries, config.max_prompt_length, source=used.source)
    return [_fitting(entry, config, source=used.source) for entry in entries]


def _warn_of_text(plain: Sequence[bool], source: RowSource) -> None:
    logger.warning(
        "%s: %d of %d prompts are text, to which the chat template is not applied; it is "
        "applied to lists of {role, content}",
        source.key,
        sum(plain),
        len(plain),
    )


def _warn_of_some_without_truth(entries: list[PromptEntry], source: RowSource) -> None:
    lacking = [entry.row for entry in entries if entry.ground_truth is None]
    if 0 < len(lacking) < len(entries):
        logger.warning(
            "%s: %d of %d rows have no ground truth, the first of them row %d",
            source.key,
            len(lacking),
            len(entries),
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


def _render(
    chats: Mapping[int, Chat | str],
    codec: TextCodec,
    *,
    source: RowSource,
    settings: Mapping[int, Mapping[str, Any]],
) -> list[str]:
    """Return the text of each prompt; rows with the same settings are rendered together."""
    alike: dict[str, dict[int, Chat]] = {}
    for row, chat in chats.items():
        if not isinstance(chat, str):
            key = json.dumps(settings[row]) if row in settings else "{}"
            alike.setdefault(key, {})[row] = chat
    rendered: dict[int, str] = {}
    for arguments, templated in alike.items():
        try:
            of_alike = codec.render(list(templated.values()), settings=json.loads(arguments))
        except ChatRefused as error:
            fault = RowFault(str(error))
            raise source.fault(list(templated)[error.position], fault) from error
        rendered.update(zip(templated, of_alike, strict=True))
    texts = [chat if isinstance(chat, str) else rendered[row] for row, chat in chats.items()]
    for row, text in zip(chats, texts, strict=True):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise source.fault(row, RowFault(f"has a prompt that is no text ({error})")) from error
    return texts


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
        remedy = (
            "Set data.filter_overlong_prompts=True, raise data.max_prompt_length, or set "
            "data.truncation to left, right or middle."
        )
        if entry.pictures:
            of_pictures = sum(picture.num_tokens for picture in entry.pictures)
            remedy = (
                f"{of_pictures} of them are of pictures: lower {PIXELS_KEY}, set "
                "data.filter_overlong_prompts=True, or raise data.max_prompt_length."
            )
        fault = RowFault(
            f"has a prompt of {length} tokens, more than data.max_prompt_length={limit}, and "
            "data.truncation='error'",
            remedy,
        )
        raise source.fault(entry.row, fault)
    return replace(entry, token_ids=truncate(entry.token_ids, limit, side=config.truncation))
