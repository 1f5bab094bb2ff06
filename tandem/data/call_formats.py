# SPDX-License-Identifier: Apache-2.0
"""The formats in which models write calls of tools, with the names of verl's ``multi_turn.format``.

A parser reads the text of one turn, decoded with its special tokens. A part that looks like a call
but is not one becomes a line of ``AssistantTurn.malformed`` and is never dropped in silence: the
environment answers it. Values of formats that have no types are typed by the schema of the tool.
``response_format`` has the format that a tokenizer brings itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, cast

from tandem.types import AssistantTurn, ToolCall

ToolSchema = Mapping[str, Any]
"""A tool in OpenAI's form: {type: function, function: {name, description, parameters}}."""

Arguments = dict[str, Any]
_SHOWN = 120
_EMPTY: Mapping[str, Any] = MappingProxyType({})


class CallRefused(ValueError):
    """The error of a text that is not a call. Its message completes "a call"."""


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call as read from text; ``call_id`` is None if the format has none."""

    name: str
    arguments: Arguments
    call_id: str | None = None


@dataclass(frozen=True, slots=True)
class SplitTurn:
    """A turn in its parts.

    Attributes:
        text: the turn without its calls.
        malformed: for each part that looks like a call and is none, a sentence that says why.
    """

    text: str
    calls: Sequence[WrittenCall]
    malformed: Sequence[str]


class CallFormat(Protocol):
    """A form in which a model writes calls."""

    @property
    def stop(self) -> str | None:
        """The token that ends a turn with calls, if it is not the usual end of a turn."""
        ...

    @property
    def reads_prompt(self) -> bool:
        """Whether the prompt may begin a part of the turn, such as a thought."""
        ...

    def split(self, text: str, *, tools: Sequence[ToolSchema], prompt: str = "") -> SplitTurn:
        """Find the calls of a turn.

        Args:
            text: the turn with its special tokens.
            prompt: the end of the text that the turn follows, if ``reads_prompt``.
        """
        ...


@dataclass(frozen=True, slots=True)
class TaggedFormat:
    """A format of calls between two tags; implements ``CallFormat``.

    Attributes:
        begin, end: the tags around one block of calls.
        read: returns the calls between the tags; raises CallRefused.
        thinking: the tag after which calls count; calls in a thought are none.
        order: brings the parts of a call into the order that ``read`` expects.
    """

    begin: str
    end: str
    read: Callable[[str, Sequence[ToolSchema]], list[WrittenCall]]
    stop: str | None = None
    thinking: str = "</think>"
    order: Callable[[str], str] = str
    reads_prompt: bool = False

    def split(self, text: str, *, tools: Sequence[ToolSchema], prompt: str = "") -> SplitTurn:
        """See ``CallFormat``."""
        found: list[WrittenCall] = []
        malformed: list[str] = []
        thought, _, said = text.rpartition(self.thinking)
        kept, rest = [], self.order(said)
        while self.begin in rest:
            before, _, rest = rest.partition(self.begin)
            kept.append(before)
            block, closed, after = rest.partition(self.end)
            try:
                if not closed:
                    raise CallRefused(f"has no {self.end} at its end")
                found += self.read(block, tools)
            except CallRefused as error:
                malformed.append(describe_refusal(error, block))
            rest = after
        kept.append(rest)
        begun = thought and thought + self.thinking
        return SplitTurn(begun + "".join(kept), found, malformed)


def parse_turn(
    text: str,
    call_format: CallFormat,
    *,
    tools: Sequence[ToolSchema],
    end_texts: Sequence[str] = (),
    first_call: int = 0,
    prompt: str = "",
) -> AssistantTurn:
    """Parse the text of a turn.

    Args:
        text: the turn with its special tokens.
        end_texts: the texts of the tokens that may close the turn.
        first_call: the number of calls of the conversation so far, for ids.
        prompt: see ``CallFormat.split``.
    """
    parts = call_format.split(text, tools=tools, prompt=prompt)
    content = parts.text
    for end in end_texts:
        content = content.removesuffix(end)
    calls = tuple(
        ToolCall(
            call.call_id or call_id(first_call + index),
            call.name,
            # A lone surrogate, which JSON can escape, is no text that a tokenizer takes.
            json.dumps(call.arguments, ensure_ascii=False).encode(errors="replace").decode(),
        )
        for index, call in enumerate(parts.calls)
    )
    return AssistantTurn(content, calls, tuple(parts.malformed))


def describe_refusal(error: CallRefused, block: str) -> str:
    """Return the sentence that says why a text is not a call."""
    return f"A call {error}: {_cut(block)!r}."


def call_id(number: int) -> str:
    """Return the id of a call by its number in the conversation: nine letters and digits."""
    return f"c{number:08d}"  # the length that Mistral's templates demand


def message_of_turn(turn: AssistantTurn) -> dict[str, Any]:
    """Return a turn as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in turn.calls
        ]
    return message


def result_message(identity: str, name: str, *, text: str) -> dict[str, Any]:
    """Return the message with the result of a call."""
    return {"role": "tool", "tool_call_id": identity, "name": name, "content": text}


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def json_value(text: str) -> Any:
    """Return the value of a JSON text. Raise CallRefused if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"is not valid JSON ({_cut(str(error))})") from error


def checked_call(name: Any, arguments: Any, *, call_id: str | None = None) -> WrittenCall:
    """Return a call. Raise CallRefused if it has no name, or arguments that are no object."""
    if not isinstance(name, str) or not name:
        raise CallRefused("has no name")
    if not isinstance(arguments, dict):
        raise CallRefused("has arguments that are not an object")
    return WrittenCall(name, cast(Arguments, arguments), call_id)


def _read_hermes(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    call = json_value(block)
    if not isinstance(call, dict) or "arguments" not in call:
        raise CallRefused('is not an object with "name" and "arguments"')
    fields = cast(dict[str, Any], call)
    arguments = fields["arguments"]
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    return [checked_call(fields.get("name"), arguments)]


_GPT_OSS = re.compile(
    r"[^<]* to=functions\.([^<\s]+)(?:<\|channel\|>[^<]*)?\s*(?:<\|constrain\|>)?(?:json)?"
    r"<\|message\|>(.*)",
    re.DOTALL,
)


_RECIPIENT_FIRST = re.compile(r"( to=functions\.[^<\s]+)\s*(<\|channel\|>commentary)")


def _name_recipient_last(text: str) -> str:
    """Put the recipient of a message behind its channel: models write it at either place."""
    return _RECIPIENT_FIRST.sub(r"\2\1 ", text)


def _read_gpt_oss(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    match = _GPT_OSS.fullmatch(block)
    if match is None:
        raise CallRefused("is not addressed to=functions.NAME with a message")
    return [checked_call(match[1], json_value(match[2]))]


def _pairs(pattern: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    return [(match[1].strip(), match[2]) for match in pattern.finditer(text)]


_XML_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
_XML_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def _read_xml(
    block: str, value_of: Callable[[tuple[str, str], str], Any]
) -> list[WrittenCall]:  # Qwen3-Coder and Seed
    calls = []
    position = 0
    for match in _XML_FUNCTION.finditer(block):
        name = match[1].strip()
        pairs = _pairs(_XML_PARAMETER, match[2])
        if len(pairs) != match[2].count("<parameter="):
            raise CallRefused("has a parameter without </parameter>")
        calls.append(checked_call(name, {key: value_of((name, key), text) for key, text in pairs}))
        position = match.end()
    if not calls or block[position:].strip():
        raise CallRefused("is not <function=NAME>...</function>")
    return calls


def _read_qwen3_coder(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    def value_of(place: tuple[str, str], text: str) -> Any:
        text = text.removeprefix("\n").removesuffix("\n")
        return typed_value(text, kind_of(tools, place, default="string"))

    return _read_xml(block, value_of)


def _read_seed(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    return _read_xml(block, lambda place, text: typed_value(text.strip(), kind_of(tools, place)))


def kind_of(tools: Sequence[ToolSchema], place: tuple[str, str], *, default: Any = None) -> Any:
    """Return the type of a parameter, or ``default`` if no schema has it.

    Args:
        place: the names of the tool and of the parameter.
    """
    name, key = place
    for tool in tools:
        function = tool["function"]
        if function["name"] == name:
            properties = (function.get("parameters") or _EMPTY).get("properties") or _EMPTY
            return _kind(properties.get(key), default)
    return default


def _kind(schema: Any, default: Any) -> Any:
    """Return the type of a schema, or ``default`` if it says none.

    Of several types one is taken: a text if the value may be one, so that no text is changed. A
    boolean comes last, because the values of the others are read in one way, which reads it too.
    """
    if not isinstance(schema, dict):
        return default
    fields = cast(dict[str, Any], schema)
    written = fields.get("type")
    if isinstance(written, str):
        return written
    if isinstance(written, list):
        kinds = cast(list[Any], written)
    else:
        options = fields.get("anyOf") or fields.get("oneOf")
        kinds = [_kind(one, None) for one in cast(list[Any], options)] if options else []
    known = [kind for kind in kinds if isinstance(kind, str) and kind != "null"]
    if "string" in known:
        return "string"
    return min(known, key=lambda kind: kind == "boolean", default=default)


def typed_value(text: str, kind: Any) -> Any:
    """Return the value of a parameter that is written without a type.

    Args:
        kind: the type of its JSON schema. A text that is no value of it stays a text.
    """
    if text.lower() == "null":
        return None
    if kind in ("string", "enum"):
        return text
    if kind == "boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


_GLM_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read_glm(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    name, tag, rest = block.partition("<arg_key>")
    pairs = _pairs(_GLM_PAIR, tag + rest)
    if len(pairs) != block.count("<arg_key>") or not re.fullmatch(r"\s*[\w.-]+\s*", name):
        raise CallRefused("is not a name with <arg_key> and <arg_value>")
    name = name.strip()
    arguments = {key: typed_value(text.strip(), kind_of(tools, (name, key))) for key, text in pairs}
    return [checked_call(name, arguments)]


_INVOKE = re.compile(r'\s*<invoke name="([^"]+)">(.*?)</invoke>\s*', re.DOTALL)
_INVOKE_PARAMETER = re.compile(r'<parameter name="([^"]+)">(.*?)</parameter>', re.DOTALL)


def _read_minimax(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    calls = []
    for name, body in _pairs(_INVOKE, block):
        pairs = _pairs(_INVOKE_PARAMETER, body)
        if len(pairs) != body.count("<parameter "):
            raise CallRefused("has a parameter without </parameter>")
        arguments = {
            key: typed_value(text.strip(), kind_of(tools, (name, key))) for key, text in pairs
        }
        calls.append(checked_call(name, arguments))
    if not calls or len(calls) != block.count("<invoke "):
        raise CallRefused('is not <invoke name="NAME">...</invoke>')
    return calls


_KIMI = re.compile(r"(.*?)<\|tool_call_argument_begin\|>(.*)", re.DOTALL)
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(?::\d+)?")


def _read_kimi(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    match = _KIMI.fullmatch(block)
    identity = None if match is None else _KIMI_ID.fullmatch(match[1].strip())
    if match is None or identity is None:
        raise CallRefused("is not functions.NAME:NUMBER with arguments")
    return [checked_call(identity[1], json_value(match[2]), call_id=match[1].strip())]


_DSML = "\uff5cDSML\uff5c"
_DSML_INVOKE = re.compile(rf'\s*<{_DSML}invoke name="(.*?)">(.*?)</{_DSML}invoke>\s*', re.DOTALL)
_DSML_PARAMETER = re.compile(
    rf'<{_DSML}parameter name="(.*?)" string="(true|false)">(.*?)</{_DSML}parameter>', re.DOTALL
)


def _read_dsml(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    calls = []
    for name, body in _pairs(_DSML_INVOKE, block):
        matches = list(_DSML_PARAMETER.finditer(body))
        if len(matches) != body.count(f"<{_DSML}parameter"):
            raise CallRefused("has a parameter that is not closed or has no type")
        arguments = {m[1]: m[3] if m[2] == "true" else json_value(m[3]) for m in matches}
        calls.append(checked_call(name, arguments))
    if not calls or len(calls) != block.count(f"<{_DSML}invoke"):
        raise CallRefused("is no invocation of a function")
    return calls


_GEMMA = re.compile(r"call:(\w+)\{(.*)\}", re.DOTALL)
_GEMMA_ARGUMENT = re.compile(r'\s*(\w+):(?:<\|"\|>(.*?)<\|"\|>|([^,}]*))\s*(?:,|$)', re.DOTALL)


def _read_gemma4(block: str, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
    match = _GEMMA.fullmatch(block.strip())
    if match is None:
        raise CallRefused("is not call:NAME{KEY:VALUE}")
    arguments: Arguments = {}
    position = 0
    while position < len(match[2]):
        argument = _GEMMA_ARGUMENT.match(match[2], position)
        if argument is None or argument.end() == position:
            raise CallRefused("has an argument that is not KEY:VALUE")
        text, bare = argument[2], argument[3]
        arguments[argument[1]] = text if text is not None else typed_value(bare.strip(), None)
        position = argument.end()
    return [checked_call(match[1], arguments)]


CALL_FORMATS: Mapping[str, TaggedFormat] = MappingProxyType(
    {
        "hermes": TaggedFormat("<tool_call>", "</tool_call>", _read_hermes),
        "gpt-oss": TaggedFormat(
            "<|channel|>commentary",
            "<|call|>",
            _read_gpt_oss,
            thinking="<|end|>",
            order=_name_recipient_last,
        ),
        "qwen3_coder": TaggedFormat("<tool_call>", "</tool_call>", _read_qwen3_coder),
        "glm": TaggedFormat("<tool_call>", "</tool_call>", _read_glm, stop="<|observation|>"),
        "seed": TaggedFormat(
            "<seed:tool_call>", "</seed:tool_call>", _read_seed, thinking="</seed:think>"
        ),
        "minimax": TaggedFormat("<minimax:tool_call>", "</minimax:tool_call>", _read_minimax),
        "kimi": TaggedFormat(
            "<|tool_call_begin|>", "<|tool_call_end|>", _read_kimi, stop="<|im_end|>"
        ),
        "deepseek_v4": TaggedFormat(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>", _read_dsml),
        "gemma4": TaggedFormat(
            "<|tool_call>", "<tool_call|>", _read_gemma4, stop="<tool_call|>", thinking="<channel|>"
        ),
    }
)
"""The formats by verl's names."""
