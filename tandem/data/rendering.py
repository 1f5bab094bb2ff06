# SPDX-License-Identifier: Apache-2.0
"""Checked rows, and the prompts that are rendered and tokenised from them.

Rows are rendered all at once or, from large data sets, when they are drawn. Both give the same
prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.data.files import Row, RowFault, RowSource
from tandem.data.images import PIXELS_KEY, PictureSource, ids_of_text
from tandem.data.seeing import SeenRows
from tandem.data.selection import truncate
from tandem.data.tokenizer import Chat, ChatRefused, TextCodec
from tandem.types import Prompt

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
CHUNK_ROWS = 4096
"""The number of rows that are rendered and tokenised together, which bounds the memory."""

_ENCODER = json.JSONEncoder(default=str)
_TURNS = "actor_rollout_ref.rollout.multi_turn"


@dataclass(frozen=True, slots=True, eq=False)
class PromptRow:
    """A checked row of a data set.

    Attributes:
        row: the number of the row, counted over all files.
        data_source, ground_truth, extra_info, messages, agent: as in ``Prompt``.
    """

    row: int
    data_source: str
    ground_truth: Any
    extra_info: Row
    messages: Chat | str
    agent: str = ""

    @property
    def content(self) -> bytes:
        """The bytes to hash for the fingerprint of the data."""
        return _content(self.messages, self.ground_truth)

    @property
    def num_characters(self) -> int:
        """The length of its messages, by which long prompts are found before they are tokenised."""
        if isinstance(self.messages, str):
            return len(self.messages)
        return sum(len(str(message.get("content") or "")) for message in self.messages)


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
        return ids_of_text(self.token_ids, self.pictures)

    @property
    def content(self) -> bytes:
        text = _content(self.messages, self.ground_truth)
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

    def settings_of(self, row: PromptRow) -> Mapping[str, Any]:
        """Return the arguments of the chat template for a row of an agent.

        An agent of the user sends its tools with its requests.
        """
        if row.agent in self.programs:
            return {}
        selected = row.extra_info.get("tool_selection")
        tools = [self.schemas[name] for name in self.schemas if not selected or name in selected]
        return {"tools": tools} if tools else {}


class PromptReader:
    """The rendering of rows of one source."""

    def __init__(
        self,
        config: DataConfig,
        codec: TextCodec,
        *,
        source: RowSource,
        rule: AgentRule,
        seen: SeenRows | None = None,
    ) -> None:
        """Create a reader.

        Args:
            seen: the pictures of the rows; None for a model of text.
        """
        self._config = config
        self._codec = codec
        self._source = source
        self._rule = rule
        self._seen = seen

    def read(self, rows: Sequence[PromptRow]) -> list[PromptEntry]:
        """Return the prompts of rows, truncated as ``data.truncation`` says.

        Raises:
            UserError: the chat template refuses a row, a prompt has no tokens, or it is too long
                with ``data.truncation=error``.
        """
        return [self.fitted(entry) for entry in self.render(rows)]

    def render(self, rows: Sequence[PromptRow]) -> list[PromptEntry]:
        """Return the prompts of rows, of any length. Raise UserError for a row that is refused."""
        return [entry for chunk in chunks(rows) for entry in self._render(chunk)]

    def lengths(self, rows: Sequence[PromptRow]) -> np.ndarray:
        """Return the length of each prompt in tokens, int32; raise the errors of ``render``."""
        found = (len(entry.token_ids) for chunk in chunks(rows) for entry in self._render(chunk))
        return np.fromiter(found, dtype=np.int32, count=len(rows))

    def fitted(self, entry: PromptEntry) -> PromptEntry:
        """Return a prompt that is truncated if it is too long; raise the errors of ``read``."""
        limit, length = self._config.max_prompt_length, len(entry.token_ids)
        if length == 0:
            raise self._source.fault(entry.row, RowFault("has a prompt without tokens"))
        if length <= limit:
            return entry
        if self._config.truncation == "error":
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
            raise self._source.fault(entry.row, fault)
        side = self._config.truncation
        return replace(entry, token_ids=truncate(entry.token_ids, limit, side=side))

    def _render(self, rows: Sequence[PromptRow]) -> Iterator[PromptEntry]:
        texts = self._texts(rows)
        plain = [isinstance(row.messages, str) for row in rows]
        for row, text, ids in zip(rows, texts, self._codec.encode(texts, plain=plain), strict=True):
            yield PromptEntry(
                row=row.row,
                data_source=row.data_source,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
                messages=row.messages,
                text=text,
                token_ids=self._tokens(row.row, ids),
                agent=row.agent,
                pictures=() if self._seen is None else self._seen.pictures[row.row],
            )

    def _tokens(self, row: int, ids: Sequence[int]) -> np.ndarray:
        if self._seen is None:
            return np.array(ids, dtype=np.int32)
        return self._seen.expand(row, ids)

    def _texts(self, rows: Sequence[PromptRow]) -> list[str]:
        """Return the text of each prompt; rows with the same settings are rendered together."""
        alike: dict[str, dict[int, Chat]] = {}
        for index, row in enumerate(rows):
            if not isinstance(row.messages, str):
                key = json.dumps(self._rule.settings_of(row)) if row.agent else "{}"
                chat = row.messages if self._seen is None else self._seen.chats[row.row]
                alike.setdefault(key, {})[index] = chat
        rendered: dict[int, str] = {}
        for arguments, chats in alike.items():
            try:
                of_alike = self._codec.render(list(chats.values()), settings=json.loads(arguments))
            except ChatRefused as error:
                refused = rows[list(chats)[error.position]].row
                raise self._source.fault(refused, RowFault(str(error))) from error
            rendered.update(zip(chats, of_alike, strict=True))
        texts = [
            rendered[index] if index in rendered else self._plain_text(row)
            for index, row in enumerate(rows)
        ]
        for row, text in zip(rows, texts, strict=True):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                fault = RowFault(f"has a prompt that is no text ({error})")
                raise self._source.fault(row.row, fault) from error
        return texts

    def _plain_text(self, row: PromptRow) -> str:
        text = row.messages if self._seen is None else self._seen.chats[row.row]
        assert isinstance(text, str), "a chat is rendered"
        return text


def chunks(rows: Sequence[PromptRow]) -> Iterator[Sequence[PromptRow]]:
    """Yield consecutive parts of at most ``CHUNK_ROWS`` rows."""
    for begin in range(0, len(rows), CHUNK_ROWS):
        yield rows[begin : begin + CHUNK_ROWS]


def _content(messages: Chat | str, ground_truth: Any) -> bytes:
    return _ENCODER.encode([messages, ground_truth]).encode()
