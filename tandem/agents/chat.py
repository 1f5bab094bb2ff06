# SPDX-License-Identifier: Apache-2.0
"""OpenAI's chat completions, as far as an agent that is trained may use them.

A field is supported, or accepted without effect and named once in the log, or refused by its name.
Nothing is ignored in silence. This file reads requests and writes answers; it knows no HTTP.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tandem.data.call_formats import ToolSchema
from tandem.types import FinishReason, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_OF_MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
_USED: Mapping[str, set[str]] = {
    "system": {"role", "content", "tool_calls"},
    "user": {"role", "content", "tool_calls"},
    "assistant": {"role", "content", "tool_calls", "reasoning_content"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
"""The fields of a message that are read, by its role."""
_READ = {
    *("messages", "model", "tools", "tool_choice", "stream", "stream_options", "stop", "logprobs"),
    *("max_tokens", "max_completion_tokens"),
}
NO_EFFECT = {
    *("temperature", "top_p", "seed", "user", "metadata", "store", "parallel_tool_calls"),
    *("service_tier", "reasoning_effort", "verbosity", "prompt_cache_key", "safety_identifier"),
}
"""Fields that are accepted and do nothing: the run decides how tokens are drawn."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Fields of which only these values are what the policy draws."""
_MAX_STOPS = 16


class RequestRefused(Exception):
    """The error of a request, which the agent gets as OpenAI's clients expect it.

    Attributes:
        status: the HTTP status.
        param: the field of the request at fault; "" for none.
        code: the code of the error; "" for none.
    """

    def __init__(self, message: str, *, status: int = 400, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        described = {"message": str(self), "type": kind}
        return {"error": {**described, "param": self.param or None, "code": self.code or None}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a turn.

    Attributes:
        messages: the conversation in one form: contents are texts, arguments of calls are objects.
        stops: the texts at which the turn ends.
        max_tokens: the maximum number of tokens of the turn; None without a limit of its own.
        has_log_probs: whether the answer shows the log-prob of each token.
        digest: the same for requests with the same body.
        num_retries: how often the client has sent the request before.
        without_effect: the fields that are accepted and do nothing, as NAME=VALUE.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[ToolSchema, ...] = ()
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    has_log_probs: bool = False
    is_streamed: bool = False
    shows_usage: bool = False
    digest: str = ""
    num_retries: int = 0
    without_effect: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A drawn turn as the agent sees it.

    Attributes:
        tokens: the text and the log-prob of each token, if the request asked for them.
    """

    text: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_drawn_tokens: int
    tokens: tuple[tuple[str, float], ...] = ()

    def message(self) -> dict[str, Any]:
        """Return the turn as a message of OpenAI's form."""
        said: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.calls:
            said["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.calls
            ]
        return said


class PendingReply(Protocol):
    """A turn that is being drawn."""

    async def reply(self) -> ChatReply:
        """Wait for the turn; may be awaited again. Raise RequestRefused if there is none."""
        ...

    def confirm(self) -> None:
        """Note that the agent has got the turn."""
        ...

    def hang_up(self) -> None:
        """Note that the agent no longer waits for the turn."""
        ...


class ChatSession(Protocol):
    """An episode, as the endpoint sees it."""

    def request(self, chat: ChatRequest) -> PendingReply:
        """Begin to draw a turn. Raise RequestRefused."""
        ...

    def refuse(self, error: RequestRefused) -> None:
        """Note that a request of the episode was refused."""
        ...


def read_chat_request(body: bytes, *, num_retries: int = 0) -> ChatRequest:
    """Read a request. Raise RequestRefused with the name of the field that cannot be served."""
    try:
        loaded, text = _load_json(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(f"the body is not valid JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise RequestRefused("the body is not an object")
    fields = {key: v for key, v in cast(dict[str, Any], loaded).items() if v is not None}
    without_effect = _check_fields(fields)
    messages = _read_messages(fields.get("messages"))
    tools = _read_tools(_typed(fields, "tools", kind=list) or [])
    without_effect |= _find_unused(fields["messages"], tools)
    options = _typed(fields, "stream_options", kind=dict) or {}
    _check_known(options, {"include_usage", "include_obfuscation"}, where="stream_options")
    return ChatRequest(
        messages=messages,
        tools=tools,
        stops=_read_stops(fields.get("stop")),
        max_tokens=_read_max_tokens(fields),
        has_log_probs=bool(fields.get("logprobs")),
        is_streamed=bool(fields.get("stream")),
        shows_usage=bool(options.get("include_usage")),
        digest=hashlib.sha256(text).hexdigest(),
        num_retries=num_retries,
        without_effect=tuple(f"{key}={_shown(value)}" for key, value in without_effect.items()),
    )


def _load_json(source: bytes | str) -> tuple[Any, bytes]:
    """Return a value that is given in JSON, and its text with sorted keys.

    A lone surrogate, such as half of an emoji that was cut, is no text that a tokenizer takes. It
    becomes a question mark, as in results of tools. Raise ValueError or RecursionError.
    """
    loaded = json.loads(source)
    text = json.dumps(loaded, sort_keys=True, ensure_ascii=False)
    try:
        return loaded, text.encode()
    except UnicodeEncodeError:
        whole = json.dumps(loaded, ensure_ascii=False).encode(errors="replace")
        return json.loads(whole), text.encode(errors="replace")


def _check_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse what cannot be served; return the fields without effect."""
    for name, neutral in _NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            rule = f"{name}={_shown(fields[name])} is not supported: tandem trains on single turns"
            if name == "response_format":
                rule = "response_format is not supported: the policy is not forced to write JSON"
            elif name == "n":
                rule += "; send a request for each"
            raise RequestRefused(rule, param=name)
    choice = fields.get("tool_choice", "auto")
    if choice not in ("auto", "required"):
        rule = f"tool_choice={_shown(choice)} is not supported: the policy decides what it calls"
        raise RequestRefused(rule, param="tool_choice")
    _check_known(fields, {*_READ, *NO_EFFECT, *_NEUTRAL}, where="the request")
    ignored = {name: fields[name] for name in fields if name in NO_EFFECT}
    if choice == "required":
        ignored["tool_choice"] = choice
    return ignored


def _find_unused(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[ToolSchema]
) -> dict[str, Any]:
    """Return the fields of messages and tools that are accepted and do nothing."""
    unused = {
        f"messages.{name}": value
        for message in messages
        for name, value in _filled(message).items()
        if name not in _USED[_role_of(message)]
    }
    if any(tool["function"].get("strict") for tool in tools):
        unused["tools.function.strict"] = True  # the policy is not forced to follow the schema
    return unused


def _filled(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value not in (None, [], {})}


def _role_of(message: Mapping[str, Any]) -> str:
    return _ROLES.get(message["role"], "tool")


def _check_known(fields: Mapping[str, Any], known: set[str], *, where: str) -> None:
    unknown = sorted(fields.keys() - known)
    if unknown:
        rule = f"{where} has the field {unknown[0]!r}, which is not supported"
        raise RequestRefused(rule, param=unknown[0])


def _typed(fields: Mapping[str, Any], name: str, *, kind: type[Any]) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestRefused(f"{name} is not of the type {kind.__name__}", param=name)
    return value


def _read_max_tokens(fields: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestRefused(f"{name}={_shown(value)} is not a number above 0", param=name)
        return value
    return None


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(one, str) and one for one in stops):
        raise RequestRefused("stop is neither a text nor a list of texts", param="stop")
    if len(stops) > _MAX_STOPS:
        raise RequestRefused(f"stop has more than {_MAX_STOPS} texts", param="stop")
    return tuple(stops)


def _read_tools(tools: list[Any]) -> tuple[ToolSchema, ...]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None  # pyright: ignore
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused("tools has an entry that is not a function", param="tools")
        if not isinstance(function.get("parameters", {}), dict | None):  # pyright: ignore
            raise RequestRefused("tools has parameters that are not an object", param="tools")
    return tuple(tools)


def _read_messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise RequestRefused("messages is not a list of messages", param="messages")
    messages = [_read_message(one, f"messages[{i}]") for i, one in enumerate(value)]
    if messages[-1]["role"] == "assistant":
        rule = "the last message is the assistant's; the policy does not continue a given turn"
        raise RequestRefused(rule, param="messages")
    named = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls", ())
    }
    return tuple(
        {"name": named.get(message["tool_call_id"], ""), **message}
        if message["role"] == "tool"
        else message
        for message in messages
    )


def _read_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestRefused(f"{place} is not an object", param="messages")
    fields = _filled(cast(dict[str, Any], message))
    role = fields.get("role")
    if not isinstance(role, str) or (role not in _ROLES and role != "tool"):
        raise RequestRefused(f"{place} has the role {_shown(role)}", param="messages")
    unknown = sorted(fields.keys() - _OF_MESSAGE)
    if unknown:
        rule = f"{place} has the field {unknown[0]!r}, which is not supported"
        raise RequestRefused(rule, param="messages")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if not isinstance(fields.get(name, ""), str):
            raise RequestRefused(f"{place}.{name} is not a text", param="messages")
    content = _read_content(fields.get("content", ""), place)
    if role == "tool":
        if "tool_call_id" not in fields:
            raise RequestRefused(f"{place} has no tool_call_id", param="messages")
        own = {"name": fields["name"]} if "name" in fields else {}
        return {"role": "tool", "content": content, "tool_call_id": fields["tool_call_id"], **own}
    read: dict[str, Any] = {"role": _ROLES[role], "content": content}
    if role == "assistant" and "reasoning_content" in fields:
        read["reasoning_content"] = fields["reasoning_content"]
    if "tool_calls" in fields:
        read["tool_calls"] = _read_calls(fields["tool_calls"], f"{place}.tool_calls")
    return read


def _read_content(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:  # pyright: ignore
        kind = part.get("type") if isinstance(part, dict) else None  # pyright: ignore
        if kind != "text" or not isinstance(part.get("text"), str):  # pyright: ignore
            rule = f"{place} has content of the type {_shown(kind)}; the policy reads text"
            raise RequestRefused(rule, param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestRefused(f"{place} is not a list", param="messages")
    return [_read_call(one, f"{place}[{i}]") for i, one in enumerate(cast(list[Any], calls))]


def _read_call(call: Any, place: str) -> dict[str, Any]:
    try:
        function = call["function"]
        name, arguments = function["name"], function["arguments"]
        loaded = _load_json(arguments)[0] if isinstance(arguments, str) else arguments
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        rule = f"{place} has no function with a name and with arguments in JSON"
        raise RequestRefused(rule, param="messages") from error
    if not isinstance(name, str):
        raise RequestRefused(f"{place}.function.name is not a text", param="messages")
    if not isinstance(loaded, dict):
        rule = f"{place}.function.arguments={_shown(arguments)} is not an object in JSON"
        raise RequestRefused(rule, param="messages")
    described = {"name": name, "arguments": loaded}
    return {"id": str(call.get("id")), "type": "function", "function": described}


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """The writer of one answer: as a whole, or as the events of a stream.

    Attributes:
        identity, created: the id of the answer, and the seconds since 1970.
    """

    identity: str
    created: int
    model: str
    shows_usage: bool = False

    def whole(self, reply: ChatReply) -> dict[str, Any]:
        """Return the answer as one object."""
        choice = {
            "index": 0,
            "message": {**reply.message(), "refusal": None},
            "finish_reason": _finish_of(reply),
            "logprobs": _log_probs(reply),
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": _usage(reply)}

    def events(self, reply: ChatReply) -> Iterator[dict[str, Any]]:
        """Yield the answer as the events of a stream; the whole turn is in the first."""
        delta = reply.message()
        delta["content"] = delta["content"] or ""
        if reply.calls:
            calls = enumerate(delta["tool_calls"])
            delta["tool_calls"] = [{"index": index, **call} for index, call in calls]
        head = self._head("chat.completion.chunk")
        first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _log_probs(reply)}
        last = {"index": 0, "delta": {}, "finish_reason": _finish_of(reply)}
        yield {**head, "choices": [first]}
        yield {**head, "choices": [last]}
        if self.shows_usage:
            yield {**head, "choices": [], "usage": _usage(reply)}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.identity, "object": kind, "created": self.created, "model": self.model}


def _finish_of(reply: ChatReply) -> str:
    if reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: ChatReply) -> dict[str, int]:
    prompt, drawn = reply.num_prompt_tokens, reply.num_drawn_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
    }


def _log_probs(reply: ChatReply) -> dict[str, Any] | None:
    if not reply.tokens:
        return None
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in reply.tokens
    ]
    return {"content": content, "refusal": None}


def same_message(ours: Mapping[str, Any], theirs: Mapping[str, Any], *, stop: str = "") -> bool:
    """Return whether an agent restates a message as it is known.

    White space around the content does not count, nor thoughts that are left out.

    Args:
        stop: the text that ended the turn and that some agents write behind it.
    """
    if ours["role"] != theirs["role"] or _calls_of(ours) != _calls_of(theirs):
        return False
    if ours.get("tool_call_id") != theirs.get("tool_call_id"):
        return False
    content = ours["content"]
    known = {content.strip(), (content + stop).strip()}
    return theirs["content"].strip() in known


def drops_thought(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Return whether a turn is restated without its thought."""
    _, found, rest = ours["content"].rpartition("</think>")
    return bool(found) and same_message({**ours, "content": rest}, theirs)


def _calls_of(message: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls", ())
    return [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls]
