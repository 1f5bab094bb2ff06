# SPDX-License-Identifier: Apache-2.0
"""The format of calls that a tokenizer brings: its response template, or its chat template.

A response template of transformers says where the parts of a turn begin and end, and how a call
reads. transformers' own parser fails as a whole if one call is malformed. Here every call is read
by itself, so that the others count and the environment answers the malformed one.

Most tokenizers have none. Then one of the known formats is found by a trial: it must read a call
that the chat template writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, cast

import regex
from transformers.utils.chat_parsing.content_parsers import process_field
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from tandem.data.call_formats import (
    CALL_FORMATS,
    CallFormat,
    CallRefused,
    SplitTurn,
    ToolSchema,
    WrittenCall,
    checked_call,
    describe_refusal,
    json_value,
    kind_of,
    typed_value,
)
from tandem.data.dialogue import Dialogue, DialogueRefused
from tandem.data.tokenizer import TextCodec

AUTO = "auto"
RESPONSE_TEMPLATE = "response template of the tokenizer"
_CALLS = "tool_calls"
_CALL = WrittenCall("calc", {"e": "Jq7Zk0"})
"""The call of a trial."""
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, RecursionError, regex.error)
"""The errors of transformers for a template that is wrong, or for a text that it cannot read."""


class NoFormat(ValueError):
    """The error of a tokenizer whose calls cannot be read. Its text is a clause."""


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of a response template; implements ``CallFormat``."""

    template: ResponseTemplate
    stop: str | None = None
    reads_prompt: bool = True

    @classmethod
    def of(cls, written: Any) -> ResponseFormat:
        """Return the format of a ``response_template`` as tokenizer_config.json has it.

        Raises:
            NoFormat: it is not valid, or has no calls.
        """
        try:
            template = load_response_template(written)
        except _FAULTS as error:
            raise NoFormat(f"has a response_template that is not valid ({error})") from error
        field = template.fields.get(_CALLS)
        if field is None or field.open_re is None:
            raise NoFormat(f"has a response_template without {_CALLS}")
        return cls(template)

    def split(self, text: str, *, tools: Sequence[ToolSchema], prompt: str = "") -> SplitTurn:
        """See ``CallFormat``."""
        begun = ""
        if self.template.start_anchor_re.search(prompt):
            begun = self.template.truncate_past_last_anchor(prompt)
        found: list[WrittenCall] = []
        malformed: list[str] = []
        kept, position = [], len(begun)
        whole = begun + text
        for region in self._calls_in(whole):
            kept.append(whole[position : region.begin])
            position = max(region.end, position)
            try:
                if not region.is_closed:
                    raise CallRefused("has no end")
                found += self._read(region, tools)
            except CallRefused as error:
                malformed.append(describe_refusal(error, region.body))
        kept.append(whole[position:])
        return SplitTurn("".join(kept), found, malformed)

    def _calls_in(self, text: str) -> Iterator[_Region]:
        """Yield the regions of calls; those in other regions, such as a thought, are none."""
        opening = [field for field in self.template.fields.values() if field.open_re is not None]
        position = 0
        while True:
            matches = [
                (match.start(), -match.end(), field.name, match, field)
                for field in opening
                if (match := field.open_re.search(text, position)) is not None
            ]
            if not matches:
                return
            *_, match, field = min(matches, key=lambda one: one[:3])
            close = None if field.close_re is None else field.close_re.search(text, match.end())
            end = len(text) if close is None else close.end()
            if field.name == _CALLS:
                body = text[match.end() : len(text) if close is None else close.start()]
                captures = {k: v for k, v in match.groupdict().items() if v is not None}
                is_closed = close is not None or field.close_re is None
                yield _Region(match.start(), end, body, captures, is_closed)
            if end == position:  # neither its beginning nor its end has a character
                opening.remove(field)
            position = end

    def _read(self, region: _Region, tools: Sequence[ToolSchema]) -> list[WrittenCall]:
        field = self.template.fields[_CALLS]
        try:
            value = process_field(region.body, field, region.captures)
        except _FAULTS as error:
            cause = str(error.__cause__ or error).partition("\n")[0]
            raise CallRefused(f"cannot be read ({cause})") from error
        if field.content == "xml-inline":
            _require_all_read(region.body, field)
        calls = cast(list[Any], value) if isinstance(value, list) else [value]
        return [_call_of(call, tools) for call in calls]


@dataclass(frozen=True, slots=True)
class _Region:
    """A part of a text that is a call.

    Attributes:
        begin, end: the positions around it, with its delimiters.
        body: the text between its delimiters.
        captures: the named groups of what opened it.
        is_closed: whether its end was there.
    """

    begin: int
    end: int
    body: str
    captures: dict[str, str]
    is_closed: bool


_CLOSING_TAG = re.compile(r"</[^<>]*>")
_PLAIN_ESCAPE = re.compile(r"\\[nrst][*+]?|\\\W")
"""White space and escaped signs, which may stand in a pattern beside literal text."""


def _require_all_read(body: str, field: ResponseTemplateField) -> None:
    """Raise CallRefused if the pattern of a template passes over a parameter.

    transformers drops the text that the pattern does not match. The pattern begins with the text
    before its group "key"; each beginning of a parameter must belong to a match of its own.
    """
    pattern: str = field.content_args["tag_pattern"]
    read = [match[0] for match in regex.finditer(pattern, body, flags=regex.DOTALL)]
    if not read and re.search(r"\w", _CLOSING_TAG.sub("", body)):
        raise CallRefused("has no parameter that can be read")
    beginning = pattern.partition("(?P<key>")[0]
    literal = _PLAIN_ESCAPE.sub("", beginning)
    if not set(literal).isdisjoint(r"\^$.|?*+()[]{}") or not re.search(r"\w", literal):
        return  # not a text by which a parameter is known
    begun = regex.compile(beginning)
    if len(begun.findall(body)) != sum(begun.match(one) is not None for one in read):
        raise CallRefused("has a parameter that cannot be read")


def _call_of(value: Any, tools: Sequence[ToolSchema]) -> WrittenCall:
    """Return a call in OpenAI's form; values that are texts are typed by the tool's schema."""
    if not isinstance(value, dict):
        raise CallRefused('is not an object with "name" and "arguments"')
    fields = cast(dict[str, Any], value)
    inner = fields.get("function", fields)
    if not isinstance(inner, dict):
        raise CallRefused('is not an object with "name" and "arguments"')
    function = cast(dict[str, Any], inner)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    call = checked_call(function.get("name"), arguments, call_id=_id_of(fields))
    kinds = {key: kind_of(tools, (call.name, key)) for key in call.arguments}
    typed = {
        key: typed_value(text, kinds[key])
        if isinstance(text, str) and kinds[key] not in (None, "string")
        else text
        for key, text in call.arguments.items()
    }
    return WrittenCall(call.name, typed, call.call_id)


def _id_of(call: Mapping[str, Any]) -> str | None:
    identity = call.get("id")
    return identity if isinstance(identity, str) and re.fullmatch(r"\S{1,64}", identity) else None


def find_format(codec: TextCodec, tools: Sequence[ToolSchema]) -> tuple[CallFormat, str]:
    """Return the format in which a model writes calls, and its name.

    Raises:
        NoFormat: neither its response template nor one of the known formats reads a call that its
            chat template writes.
    """
    dialogue = Dialogue(codec, tools)
    try:
        prompt, written = _split_prompt(*dialogue.write_call(_CALL.name, _CALL.arguments))
    except DialogueRefused as error:
        raise NoFormat(f"has a chat template that {error}") from error
    template = getattr(codec.tokenizer, "response_template", None)
    if template is not None:
        own = ResponseFormat.of(template)
        if _reads(own, written, prompt=prompt):
            return own, RESPONSE_TEMPLATE
        raise NoFormat("has a response_template that does not read the calls of its chat template")
    found = [name for name, one in CALL_FORMATS.items() if _reads(one, written, prompt=prompt)]
    if not found:
        raise NoFormat(
            "has no response_template, and its chat template writes calls in none of the known "
            "formats"
        )
    return CALL_FORMATS[found[0]], found[0]


def _split_prompt(prompt: str, whole: str) -> tuple[str, str]:
    """Return the prompt as far as the conversation repeats it, and the turn behind it."""
    length = len(commonprefix([prompt, whole]))
    tag = whole.rfind("<", 0, length)
    if tag >= 0 and ">" not in whole[tag:length]:  # two tags begin with the same letters
        length = tag
    return whole[:length], whole[length:]


def _reads(call_format: CallFormat, written: str, *, prompt: str) -> bool:
    parts = call_format.split(written, tools=(), prompt=prompt)
    calls = [(call.name, call.arguments) for call in parts.calls]
    return not parts.malformed and calls == [(_CALL.name, _CALL.arguments)]
