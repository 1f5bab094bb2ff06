# SPDX-License-Identifier: Apache-2.0
"""OpenAI's requests: what is read, what has no effect, and what is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.agents.chat import (
    ChatReply,
    CompletionWriter,
    RequestRefused,
    drops_thought,
    read_chat_request,
    same_message,
)
from tandem.types import FinishReason, ToolCall

USER = {"role": "user", "content": "q"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def test_a_request_is_read_in_one_form() -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}],
        },
        USER,
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
    ]
    fields = {"tools": [TOOL], "stop": "END", "max_completion_tokens": 9, "temperature": 0.0}
    options = {"stream": True, "stream_options": {"include_usage": True}, "tool_choice": "required"}
    chat = read_chat_request(body(**{"messages": messages}, **fields, **options), num_retries=1)
    described = {"name": "look", "arguments": {"a": 1}}
    call = {"id": "c1", "type": "function", "function": described}
    assert [dict(message) for message in chat.messages] == [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"name": "look", "role": "tool", "content": "seen", "tool_call_id": "c1"},
    ]
    assert (chat.tools, chat.stops, chat.max_tokens) == ((TOOL,), ("END",), 9)
    assert chat.is_streamed and chat.shows_usage and chat.num_retries == 1
    assert set(chat.without_effect) == {"temperature=0.0", 'tool_choice="required"'}
    again = read_chat_request(body(**{"messages": messages}, **options, **fields))
    assert again.digest == chat.digest, "the order of fields does not count"


def calling(call: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [call]}


def with_function(**fields: Any) -> dict[str, Any]:
    return {**CALL, "function": {"name": "look", "arguments": "{}", **fields}}


def test_fields_of_messages_and_tools_that_do_nothing_are_named() -> None:
    messages = [
        {**USER, "name": "alice", "tool_calls": [], "refusal": None},
        {**calling(CALL), "name": "poet", "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "name": "look", "content": "seen"},
        {**USER, "tool_call_id": "c1"},
    ]
    strict = {"type": "function", "function": {"name": "look", "parameters": {}, "strict": True}}
    chat = read_chat_request(body(messages=messages, tools=[TOOL, strict], user="u"))
    named = {'user="u"', 'messages.name="poet"', 'messages.tool_call_id="c1"'}
    assert set(chat.without_effect) == {*named, "tools.function.strict=true"}
    loose = {"type": "function", "function": {"name": "look", "strict": False}}
    assert read_chat_request(body(tools=[loose])).without_effect == ()


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"n": 2}, "n", "n=2 is not supported.*send a request for each"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not forced to write JSON"),
    ({"logit_bias": {"1": 5}}, "logit_bias", "logit_bias="),
    ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty=0.5"),
    ({"top_logprobs": 5}, "top_logprobs", "top_logprobs=5"),
    ({"tool_choice": "none"}, "tool_choice", "the policy decides what it calls"),
    ({"guided_json": {}}, "guided_json", "the field 'guided_json', which is not supported"),
    ({"stream_options": {"x": 1}}, "x", "stream_options has the field 'x'"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 is not a number above 0"),
    ({"stop": [1]}, "stop", "neither a text nor a list"),
    ({"tools": [{"type": "web"}]}, "tools", "not a function"),
    ({"messages": []}, "messages", "not a list of messages"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages", 'the role "function"'),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages", "is the assistant's"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "no tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages",
        'messages.0. has content of the type "image_url"',
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}, USER]},
        "messages",
        r"messages.0..tool_calls.0. has no function with a name and with arguments in JSON",
    ),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages", r'the role \["user"\]'),
    ({"messages": [{"role": {"a": 1}, "content": "x"}]}, "messages", "messages.0. has the role"),
    ({"messages": [{**USER, "name": 5}]}, "messages", "messages.0..name is not a text"),
    ({"messages": [{"role": "tool", "tool_call_id": 5}]}, "messages", "tool_call_id is not a text"),
    ({"messages": [{**USER, "tool_calls": 5}]}, "messages", "messages.0..tool_calls is not a list"),
    ({"messages": [calling(5)]}, "messages", "messages.0..tool_calls.0. has no function"),
    ({"messages": [calling({**CALL, "function": "x"})]}, "messages", "has no function"),
    ({"messages": [calling(with_function(name=None))]}, "messages", "name is not a text"),
    ({"messages": [calling(with_function(arguments="null"))]}, "messages", "arguments=.*null"),
    ({"messages": [calling(with_function(arguments='"x"'))]}, "messages", "not an object in JSON"),
    ({"messages": [calling(with_function(arguments=[1]))]}, "messages", r"arguments=\[1\] is not"),
    ({"tools": [{"function": {"name": "x", "parameters": 5}}]}, "tools", "are not an object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_its_name(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message) as caught:
        read_chat_request(body(**fields))
    assert (caught.value.status, caught.value.param) == (400, param)
    error = caught.value.body()["error"]
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_object_is_refused(text: bytes) -> None:
    with pytest.raises(RequestRefused, match="the body is not"):
        read_chat_request(text)


CUT = chr(0xD83D)


def test_a_lone_surrogate_becomes_a_question_mark_wherever_it_stands() -> None:
    """JavaScript writes one for an emoji that was cut, and no tokenizer takes it."""
    tool = {"type": "function", "function": {"name": "look", "description": f"d{CUT}"}}
    messages = [
        {"role": "user", "content": f"happy {CUT}"},
        calling(with_function(arguments=json.dumps({"a": f"x{CUT}"}))),
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": f"{CUT}!"}]},
    ]
    fields = {"messages": messages, "tools": [tool], "stop": [f"E{CUT}"]}
    escaped = body(**fields)
    raw = json.dumps({"model": "m", **fields}, ensure_ascii=False).encode(errors="surrogatepass")
    for text in (escaped, raw):
        chat = read_chat_request(text)
        user, said, result = chat.messages
        assert (user["content"], result["content"]) == ("happy ?", "?!")
        assert said["tool_calls"][0]["function"]["arguments"] == {"a": "x?"}
        assert chat.tools[0]["function"]["description"] == "d?" and chat.stops == ("E?",)
    whole = read_chat_request(body(messages=[{"role": "user", "content": chr(0x1F600)}]))
    assert whole.messages[0]["content"] == chr(0x1F600)


def test_an_answer_is_an_object_or_the_events_of_a_stream() -> None:
    call = ToolCall("c1", "look", '{"a": 1}')
    reply = ChatReply("", (call,), FinishReason.STOP, 5, 3, (("x", -0.5),))
    writer = CompletionWriter("id", 7, "policy", shows_usage=True)
    whole = writer.whole(reply)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    first, last, usage = writer.events(reply)
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    cut = ChatReply("x", (), FinishReason.LENGTH, 5, 3)
    assert writer.whole(cut)["choices"][0]["finish_reason"] == "length"


def test_a_message_is_the_same_whatever_white_space_and_stop_text_stand_around_it() -> None:
    said = {"role": "assistant", "content": " It is 42.\n"}
    assert same_message(said, {"role": "assistant", "content": "It is 42."})
    assert same_message(
        said, {"role": "assistant", "content": " It is 42.\n</code>"}, stop="</code>"
    )
    assert not same_message(said, {"role": "assistant", "content": "It is 42.</code>"}, stop="</c>")
    assert not same_message(said, {"role": "user", "content": "It is 42."})
    assert not same_message(said, {**said, "tool_calls": [CALL]})
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is 42."}
    assert drops_thought(thought, said) and not drops_thought(said, thought)
