# SPDX-License-Identifier: Apache-2.0
"""The nine formats of calls against literal texts (M11 of the specification of agents)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.data.call_formats import CALL_FORMATS, parse_turn
from tandem.types import AssistantTurn

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"q": {"type": "string"}, "k": {"type": "integer"}},
            },
        },
    }
]
D = "\uff5cDSML\uff5c"
KIMI = "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}<|tool_call_end|>"
VALID = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {json}}}\n</tool_call>',
    "gpt-oss": "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}"
    "<|call|>",
    "qwen3_coder": "<tool_call>\n<function={name}>\n<parameter=q>\n7\n</parameter>\n"
    "<parameter=k>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>{name}\n<arg_key>q</arg_key>\n<arg_value>7</arg_value>\n<arg_key>k</arg_key>"
    "\n<arg_value>3</arg_value>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function={name}>\n<parameter=q>7</parameter>\n"
    "<parameter=k>3</parameter>\n</function>\n</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="{name}">\n<parameter name="q">7</parameter>\n'
    '<parameter name="k">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi": KIMI,
    "deepseek_v4": f"<{D}tool_calls>\n"
    f'<{D}invoke name="{{name}}">\n<{D}parameter name="q" string="true">7</{D}parameter>\n'
    f'<{D}parameter name="k" string="false">3</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>',
    "gemma4": '<|tool_call>call:{name}{{q:<|"|>7<|"|>,k:3}}<tool_call|>',
}
BROKEN = {
    "hermes": '<tool_call>\n{"name": "find", "arguments": {"q": }\n</tool_call>',
    "gpt-oss": '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": <|call|>',
    "qwen3_coder": "<tool_call>\n<function=find>\n<parameter=q>\n7\n</function>\n</tool_call>",
    "glm": "<tool_call>find\n<arg_key>q</arg_key>\n</tool_call>",
    "seed": "<seed:tool_call>\n<function=find>\n<parameter=q>7</seed:tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="find">\n</minimax:tool_call>',
    "kimi": "<|tool_call_begin|>functions.find:0<|tool_call_end|>",
    "deepseek_v4": f'<{D}tool_calls>\n<{D}invoke name="find">\n</{D}tool_calls>',
    "gemma4": "<|tool_call>call:find(q=7)<tool_call|>",
}
FORMATS = sorted(CALL_FORMATS)


def parse(text: str, name: str) -> AssistantTurn:
    ends = ("<|im_end|>", "<|observation|>")
    return parse_turn(text, CALL_FORMATS[name], tools=TOOLS, end_texts=ends, first_call=4)


def valid(name: str, tool: str = "find") -> str:
    return VALID[name].format(name=tool, json='{"q": "7", "k": 3}')


def calls(turn: AssistantTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def test_m11_every_format_of_verl_is_there() -> None:
    assert set(FORMATS) == set(VALID) == set(BROKEN)


@pytest.mark.parametrize("name", FORMATS)
def test_m11_a_valid_call(name: str) -> None:
    """A value of the type string stays a text, although it reads like a number."""
    turn = parse(valid(name), name)
    assert calls(turn) == [("find", {"q": "7", "k": 3})]
    assert turn.malformed == () and turn.text == ""
    assert turn.calls[0].call_id == ("functions.find:0" if name == "kimi" else "c00000004")


@pytest.mark.parametrize("name", FORMATS)
def test_m11_two_calls_with_prose_around(name: str) -> None:
    text = f"Let me look.{valid(name)}{valid(name, 'other')}<|im_end|>"
    turn = parse(text, name)
    (first, second) = calls(turn)
    assert first == ("find", {"q": "7", "k": 3})
    # A tool without a schema: formats without types guess.
    assert second[0] == "other" and {k: str(v) for k, v in second[1].items()} == {
        "q": "7",
        "k": "3",
    }
    assert turn.text == "Let me look."
    assert len({call.call_id for call in turn.calls}) == 2


@pytest.mark.parametrize("name", FORMATS)
def test_m11_a_broken_call_is_malformed_and_others_count(name: str) -> None:
    turn = parse(BROKEN[name] + valid(name), name)
    assert calls(turn) == [("find", {"q": "7", "k": 3})]
    (line,) = turn.malformed
    assert line.startswith("A call ") and "\n" not in line


@pytest.mark.parametrize("name", FORMATS)
def test_m11_a_truncated_call_is_malformed(name: str) -> None:
    for length in (len(CALL_FORMATS[name].begin) + 3, len(valid(name)) - 3):
        turn = parse(valid(name)[:length], name)
        assert turn.calls == () and len(turn.malformed) == 1
        assert f"has no {CALL_FORMATS[name].end} at its end" in turn.malformed[0]


@pytest.mark.parametrize("name", FORMATS)
def test_m11_an_answer_has_no_call(name: str) -> None:
    assert parse("It is 42.<|im_end|>", name) == AssistantTurn("It is 42.")


def test_m11_calls_in_a_thought_are_none() -> None:
    turn = parse(f"<think>{valid('hermes')}</think>done", "hermes")
    assert turn.calls == () and turn.malformed == ()
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert calls(parse(thought + valid("gpt-oss"), "gpt-oss")) == [("find", {"q": "7", "k": 3})]


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ('{"name": "find"}', '"name" and "arguments"'),
        ('{"name": 3, "arguments": {}}', "has no name"),
        ('{"name": "find", "arguments": [1]}', "not an object"),
        ("[" * 100_000, "not valid JSON"),
        ("7", '"name" and "arguments"'),
    ],
)
def test_m11_faults_of_hermes_calls(call: str, fault: str) -> None:
    turn = parse(f"<tool_call>{call}</tool_call>", "hermes")
    assert turn.calls == () and fault in turn.malformed[0]
    assert len(turn.malformed[0]) < 400


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
@pytest.mark.parametrize(
    ("kind_q", "kind_k"),
    [
        ({"type": ["string", "null"]}, {"type": ["integer", "null"]}),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"anyOf": [{"type": "integer"}]}),
        ({"oneOf": [{"type": "null"}, {"type": "string"}]}, {"type": ["boolean", "integer"]}),
        ({"type": ["null", "string"]}, {"anyOf": [{"type": "null"}, {"type": "number"}]}),
    ],
)
def test_a_value_of_several_types_is_a_text_if_it_may_be_one(
    name: str, kind_q: Any, kind_k: Any
) -> None:
    parameters = {"type": "object", "properties": {"q": kind_q, "k": kind_k}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    turn = parse_turn(valid(name), CALL_FORMATS[name], tools=tools, end_texts=())
    assert calls(turn) == [("find", {"q": "7", "k": 3})]


def test_a_parameter_of_any_value_has_no_type() -> None:
    parameters = {"type": "object", "properties": {"q": True, "k": {"anyOf": [True]}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    turn = parse_turn(valid("qwen3_coder"), CALL_FORMATS["qwen3_coder"], tools=tools)
    assert calls(turn) == [("find", {"q": "7", "k": "3"})]
    turn = parse_turn(valid("glm"), CALL_FORMATS["glm"], tools=tools)
    assert calls(turn) == [("find", {"q": 7, "k": 3})]


def test_a_lone_surrogate_that_a_call_escapes_becomes_a_question_mark() -> None:
    text = VALID["hermes"].format(name="find", json=r'{"q": "\ud83d \ud83d\ude00"}')
    (call,) = parse_turn(text, CALL_FORMATS["hermes"], tools=TOOLS).calls
    assert json.loads(call.arguments) == {"q": f"? {chr(0x1F600)}"}


def test_arguments_may_be_json_in_a_text() -> None:
    turn = parse('<tool_call>{"name": "find", "arguments": "{\\"q\\": 1}"}</tool_call>', "hermes")
    assert calls(turn) == [("find", {"q": 1})]
