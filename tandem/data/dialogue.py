# SPDX-License-Identifier: Apache-2.0
"""The tokens that stand between two turns of a conversation, for any chat template by one rule.

No text of the model is ever encoded. The tokens between two turns are taken from a stand-in of the
conversation that contains nothing the model wrote. P is the stand-in up to the turn, Q the same
with the new messages and a generation prompt. K is what the template puts behind the content of a
turn: the tokens of P from the token that closes the turn, and those of Q behind P. If the model
drew the first token of K, the rest of K follows its turn, else all of K. Nothing drawn is removed.

K begins at a special token, which tokenizers isolate, so that it may be encoded by itself.
``probe`` checks this, and all else that the rule assumes of a template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.data.call_formats import ToolSchema, call_id, result_message
from tandem.data.tokenizer import ChatRefused, Message, TextCodec

_QUESTION: Message = {"role": "user", "content": "u"}
_SENTINEL = "Jq7Zk"
"""A text that occurs in no template."""
_PARAMETER = "e"
_MAX_KEPT = 512

TOOL = "tool"
TWO_TOOLS = "two tools"
USER = "user"


class DialogueRefused(ValueError):
    """The error of a template that cannot go on after a turn. Its text is a clause."""


@dataclass(frozen=True, slots=True)
class ProbedFact:
    """The result of trying the rule on a template.

    Attributes:
        kind: what follows the turn: ``tool``, ``two tools`` or ``user``.
        fault: why the rule does not hold, as a clause whose subject is the template; "" if it does.
        appends: whether the template keeps all text before the new messages. If it does not (it
            drops the thoughts of earlier turns), appending shows the model more than the template.
    """

    kind: str
    fault: str
    appends: bool


class Dialogue:
    """The rule for one tokenizer, one chat template and one set of tools."""

    def __init__(self, codec: TextCodec, tools: Sequence[ToolSchema]) -> None:
        self._codec = codec
        self._ends = frozenset(codec.eos_ids)
        self._settings: Mapping[str, Any] = {"tools": list(tools)} if tools else {}
        self._kept: dict[tuple[tuple[str, str], ...], tuple[str, list[int]]] = {}
        self._write_arguments = self._find_writer()

    def between(self, messages: Sequence[Message], *, last_id: int) -> list[int]:
        """Return the tokens that are given after a turn, up to the beginning of the next turn.

        Args:
            messages: the results of tools, in the order of the calls, or a message of the user.
            last_id: the last token of the turn.

        Raises:
            DialogueRefused: the template cannot go on in this way.
        """
        if messages[0]["role"] == "tool":
            closing, text = self._after_calls(messages)
        else:
            closing, text = self._after_answer(messages)
        ids = closing + self._codec.encode([text])[0]
        if not ids:
            raise DialogueRefused("renders nothing between two turns")
        return ids[1:] if ids[0] == last_id else ids

    def is_surely_longer(self, messages: Sequence[Message], num_tokens: int) -> bool:
        """Return whether messages have more tokens than these; False if only encoding can tell.

        Encoding takes seconds for a million characters, and a tool may return many more.
        """
        given = [one.get("content") for one in messages if one["role"] != "assistant"]
        num_characters = sum(len(text) for text in given if isinstance(text, str))
        # The vocabulary is not asked for its longest token as long as one of a character would fit.
        is_long = num_characters > num_tokens
        return is_long and num_characters > num_tokens * self._codec.longest_token

    def encode_whole(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a whole conversation, up to the beginning of the next turn.

        Earlier turns are rendered as the template renders them, which may differ from what was
        drawn. Raise DialogueRefused if the template refuses the conversation.
        """
        chat = [_with_arguments(message, self._write_arguments) for message in messages]
        return self._codec.encode([self._render(chat, prompts=True)])[0]

    def write_call(self, name: str, arguments: Mapping[str, str]) -> tuple[str, str]:
        """Return a prompt, and the same with a turn that makes a call, as the template has them.

        Raises:
            DialogueRefused: the template refuses the conversation.
        """
        function = {"name": name, "arguments": self._write_arguments(arguments)}
        call = {"id": call_id(0), "type": "function", "function": function}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        prompt = self._render([_QUESTION], prompts=True)
        return prompt, self._render([_QUESTION, turn], prompts=False)

    def probe(self, kinds: Sequence[str] = (TOOL, TWO_TOOLS, USER)) -> tuple[ProbedFact, ...]:
        """Try the rule on the template, for each kind of what may follow a turn."""
        return tuple(self._probe(kind) for kind in kinds)

    def _find_writer(self) -> Callable[[Mapping[str, str]], Any]:
        """Return how the template takes arguments: as an object, or as its JSON text."""
        for write in (dict, json.dumps):
            turn = _turn_with_calls(_probe_messages(TOOL), write)
            try:
                self._render([_QUESTION, turn], prompts=False)
            except DialogueRefused:
                continue
            return write
        return dict

    def _stand_in(self, messages: Sequence[Message]) -> list[Message]:
        return [_QUESTION, _turn_with_calls(messages, self._write_arguments)]

    def _render(self, chat: Sequence[Message], *, prompts: bool) -> str:
        try:
            return self._codec.render([chat], generation_prompt=prompts, settings=self._settings)[0]
        except ChatRefused as error:
            raise DialogueRefused(str(error)) from error

    def _after_calls(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """Return the tokens of P that close its turn, and the text of Q behind P."""
        stand_in = self._stand_in(messages)
        key = tuple((str(m.get("tool_call_id")), str(m.get("name"))) for m in messages)
        before, closing = self._kept.get(key) or self._keep(key, stand_in)
        whole = self._render([*stand_in, *messages], prompts=True)
        if not whole.startswith(before):
            before, closing = self._keep(key, stand_in)  # a template may write the date
        if not whole.startswith(before):
            raise DialogueRefused("renders a turn differently when a tool's result follows")
        return closing, whole[len(before) :]

    def _keep(
        self, key: tuple[tuple[str, str], ...], stand_in: Sequence[Message]
    ) -> tuple[str, list[int]]:
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        text = self._render(stand_in, prompts=False)
        self._kept[key] = text, self._closing(text)
        return self._kept[key]

    def _closing(self, text: str) -> list[int]:
        """Return the tokens from the last end of a turn on, if only white space follows it."""
        ids = self._codec.encode([text])[0]
        last = max((i for i, token in enumerate(ids) if token in self._ends), default=len(ids))
        rest = self._codec.decode([ids[last + 1 :]], skip_special=False)[0]
        return [] if rest.strip() else ids[last:]

    def _after_answer(self, messages: Sequence[Message]) -> tuple[list[int], str]:
        """Return the tokens of P that close its turn, and the text of Q behind them.

        A sentinel marks the content of the turn, because many templates change what stands before
        it when a message of the user follows.
        """
        stand_in = [_QUESTION, _answer()]
        closed = self._behind_answer(stand_in, prompts=False)
        text = self._behind_answer([*stand_in, *messages], prompts=True)
        if not text.startswith(closed):
            return [], text
        return self._closing(closed), text[len(closed) :]

    def _behind_answer(self, chat: Sequence[Message], *, prompts: bool) -> str:
        _, found, text = self._render(chat, prompts=prompts).rpartition(_SENTINEL)
        if not found:
            raise DialogueRefused("drops the content of an earlier turn")
        return text

    def _probe(self, kind: str) -> ProbedFact:
        messages = _probe_messages(kind)
        try:
            fault = self._fault(messages)
            appends = not fault and (kind != USER or self._appends(messages))
        except DialogueRefused as error:
            fault, appends = str(error), False
        return ProbedFact(kind, fault, appends)

    def _fault(self, messages: Sequence[Message]) -> str:
        """Return why the rule does not hold for these messages; "" if it does."""
        after_calls = messages[0]["role"] == "tool"
        stand_in = self._stand_in(messages) if after_calls else [_QUESTION, _answer()]
        whole = self._render([*stand_in, *messages], prompts=True)
        if any(str(message["content"]) not in whole for message in messages):
            return f"drops a message of the role {messages[0]['role']!r}"
        given = self.between(messages, last_id=-1)
        if after_calls and _argument(0) not in self._render(stand_in, prompts=False):
            return "drops the calls of a turn"
        return "" if self._codec.encode([whole])[0][-len(given) :] == given else _INEXACT

    def _appends(self, messages: Sequence[Message]) -> bool:
        stand_in = [_QUESTION, {**_answer(), "reasoning_content": "r"}]
        before = self._render(stand_in, prompts=False)
        return self._render([*stand_in, *messages], prompts=True).startswith(before)


_INEXACT = "has no special token at the end of a turn, so that what follows is encoded differently"


def _argument(index: int) -> str:
    return f"{_SENTINEL}{index}"


def _turn_with_calls(
    messages: Sequence[Message], write_arguments: Callable[[Mapping[str, str]], Any]
) -> Message:
    """Return a turn that made the calls which the first messages answer.

    It has a thought: Qwen3's template writes an empty one into a last turn without any.
    """
    results = [message for message in messages if message["role"] == "tool"]
    calls = [
        {
            "id": result.get("tool_call_id"),
            "type": "function",
            "function": {
                "name": result.get("name"),
                "arguments": write_arguments({_PARAMETER: _argument(index)}),
            },
        }
        for index, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": calls}


def _with_arguments(message: Message, write_arguments: Callable[[Any], Any]) -> Message:
    """Return a message whose calls have their arguments, objects, as the template takes them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": write_arguments(call["function"]["arguments"]),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _answer() -> Message:
    return {"role": "assistant", "content": _SENTINEL}


def _probe_messages(kind: str) -> list[Message]:
    if kind == USER:
        return [{"role": "user", "content": "Wn4Bx"}]
    count = 2 if kind == TWO_TOOLS else 1
    return [result_message(call_id(i), "calc", text=f"Wn4Bx{i}") for i in range(count)]
