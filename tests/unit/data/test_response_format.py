# SPDX-License-Identifier: Apache-2.0
"""``multi_turn.format=auto``: response templates and chat templates of published models (M11)."""

from __future__ import annotations

import json
import random
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import regex

from tandem.data.call_formats import parse_turn
from tandem.data.response_format import RESPONSE_TEMPLATE, NoFormat, ResponseFormat, find_format
from tandem.data.tokenizer import TextCodec
from tests.fakes import made_tokenizers
from tests.fakes.made_tokenizers import codec_for

OWN = Path(made_tokenizers.__file__).parent / "response_templates"
PARAMETERS = {"q": {"type": "string"}, "k": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": PARAMETERS},
        },
    }
    for name in ("find", "other")
]
ASKED = {"role": "user", "content": "u"}
CHATS = {
    "diffusion_gemma": "gemma4",
    "glm4moe": "glm4moe",
    "gptoss": "gptoss",
    "lfm2_2_5": "lfm2_2_5",
    "llama3_1": "llama3",
    "nemotron_3_nano": "nemotron_3",
    "qwen2_5": "qwen3",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3_5",
    "qwen3_5_think": "qwen3_5",
    "qwen3_6": "qwen3_5",
    "qwen3_vl": "qwen3",
}
"""The response template of each chat template."""
FOUND = {
    "diffusion_gemma": "gemma4",
    "glm4moe": "glm",
    "gptoss": "gpt-oss",
    "nemotron_3_nano": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_vl": "hermes",
}
"""The format that reads a call of each chat template."""
ONE_CALL = ("gptoss", "llama3_1")
"""Templates that end a turn with its first call."""


def codec_with(name: str, *, own: bool) -> TextCodec:
    made = codec_for(name)
    codec = TextCodec(copy(made.tokenizer), eos_ids=made.eos_ids)
    if own:
        written = json.loads((OWN / f"{CHATS[name]}.json").read_text("utf-8"))
        codec.tokenizer.response_template = written
    return codec


def turn_of(codec: TextCodec, *calls: tuple[str, dict[str, Any]]) -> tuple[str, str]:
    """Return the prompt and the turn that the chat template writes for calls."""
    written = [
        {
            "id": f"c{number:08d}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    turn = {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": written}
    settings = {"tools": TOOLS}
    (prompt,) = codec.render([[ASKED]], settings=settings)
    (whole,) = codec.render([[ASKED, turn]], generation_prompt=False, settings=settings)
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    header = prompt[: prompt.rindex("<think>")]  # the turn has another thought than the prompt
    assert whole.startswith(header)
    return header, whole[len(header) :]


def calls_in(codec: TextCodec, prompt: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    found, _ = find_format(codec, TOOLS)
    turn = parse_turn(text, found, tools=TOOLS, prompt=prompt)
    assert turn.malformed == ()
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


@pytest.mark.parametrize("name", CHATS)
def test_m11_the_response_template_of_the_tokenizer_is_the_first_choice(name: str) -> None:
    """It reads what transformers' own parser reads, with values of the types of the schema."""
    codec = codec_with(name, own=True)
    assert find_format(codec, TOOLS)[1] == RESPONSE_TEMPLATE
    expected = [("find", {"q": "7", "k": 3}), ("other", {"q": "a, b", "k": -1})]
    calls = expected[: 1 if name in ONE_CALL else 2]
    prompt, text = turn_of(codec, *calls)
    assert calls_in(codec, prompt, text) == calls
    parsed: Any = codec.tokenizer.parse_response(text, prefix=prompt, tools=[*TOOLS])
    functions = [call["function"] for call in parsed["tool_calls"]]
    assert [(one["name"], one["arguments"]) for one in functions] == calls


@pytest.mark.parametrize("name", CHATS)
def test_m11_without_one_the_format_that_reads_the_chat_template_is_found(name: str) -> None:
    codec = codec_with(name, own=False)
    if name not in FOUND:
        with pytest.raises(NoFormat, match="in none of the known formats"):
            find_format(codec, TOOLS)
        return
    assert find_format(codec, TOOLS)[1] == FOUND[name]
    calls = [("find", {"q": "x", "k": 3})]
    assert calls_in(codec, *turn_of(codec, *calls)) == calls


@pytest.mark.parametrize("name", CHATS)
def test_m11_a_broken_call_is_malformed_and_others_count(name: str) -> None:
    codec = codec_with(name, own=True)
    found, _ = find_format(codec, TOOLS)
    prompt, text = turn_of(codec, ("find", {"q": "x", "k": 3}))
    for length in range(len(text)):
        turn = parse_turn(text[:length], found, tools=TOOLS, prompt=prompt)
        assert len(turn.calls) + len(turn.malformed) <= 1
        assert all("\n" not in line and len(line) < 400 for line in turn.malformed)
    whole = parse_turn(text, found, tools=TOOLS, prompt=prompt)
    assert len(whole.calls) == 1
    value = text.index("x", text.index("find"))
    cut = parse_turn(text[:value], found, tools=TOOLS, prompt=prompt)
    assert cut.calls == () and len(cut.malformed) == 1 and "has no end" in cut.malformed[0]


def test_m11_what_is_no_json_is_malformed_and_the_next_call_counts() -> None:
    own = ResponseFormat.of(json.loads((OWN / "qwen3.json").read_text("utf-8")))
    good = '<tool_call>\n{"name": "find", "arguments": {"q": 7, "k": "3"}}\n</tool_call>'
    broken = ('{"name": "find"', "[]", '{"name": 3, "arguments": {}}', "[" * 100_000)
    for block in broken:
        text = f"Let me look.<tool_call>{block}</tool_call>{good}<|im_end|>"
        turn = parse_turn(text, own, tools=TOOLS, end_texts=("<|im_end|>",))
        assert [json.loads(call.arguments) for call in turn.calls] == [{"q": 7, "k": 3}]
        assert len(turn.malformed) == 1, block
        assert turn.text == "Let me look."


QWEN_CALL = "<tool_call>\n<function=find>\n{}\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>find\n{}\n</tool_call>"


@pytest.mark.parametrize(
    ("own", "call", "written"),
    [
        ("qwen3_5", QWEN_CALL, "<parameter=q>\n7"),
        ("qwen3_5", QWEN_CALL, "<parameter=q>\n7\n<parameter=k>\n3\n</parameter>"),
        ("qwen3_5", QWEN_CALL, "<parameter=q>\n7\n</parameter>\n<parameter=k>\n3"),
        ("qwen3_5", QWEN_CALL, '{"q": "7", "k": 3}'),
        ("nemotron_3", QWEN_CALL, "<parameter=k>\n3\n</parameter>\n<parameter=q\n7\n</parameter>"),
        ("glm4moe", GLM_CALL, "<arg_key>k</arg_key><arg_value>3</arg_value>"),
        ("glm4moe", GLM_CALL, "<arg_key>k</arg_key>"),
        (
            "glm4moe",
            GLM_CALL,
            "<arg_key>q</arg_key>\n<arg_value>7\n<arg_key>k</arg_key>\n<arg_value>3</arg_value>",
        ),
        ("lfm2_2_5", "<|tool_call_start|>[find({})]<|tool_call_end|>", "'7'"),
    ],
)
def test_a_parameter_that_the_pattern_passes_over_makes_its_call_malformed(
    own: str, call: str, written: str
) -> None:
    found = ResponseFormat.of(json.loads((OWN / f"{own}.json").read_text("utf-8")))
    turn = parse_turn(call.format(written), found, tools=TOOLS)
    assert turn.calls == ()
    (line,) = turn.malformed
    assert "parameter that ca" in line and "\n" not in line


@pytest.mark.parametrize(
    ("own", "call"), [("qwen3_5", QWEN_CALL), ("nemotron_3", QWEN_CALL), ("glm4moe", GLM_CALL)]
)
def test_a_call_without_parameters_is_one(own: str, call: str) -> None:
    found = ResponseFormat.of(json.loads((OWN / f"{own}.json").read_text("utf-8")))
    turn = parse_turn(call.format(""), found, tools=TOOLS)
    assert turn.malformed == () and [one.arguments for one in turn.calls] == ["{}"]


@pytest.mark.parametrize(
    ("beginning", "parameter"),
    [
        (r"<argument\s+name=\"", '<argument name="{}">{}</argument>'),
        (r"\[argument ", "[argument {}>{}</argument>"),
    ],
)
def test_the_beginning_of_a_parameter_may_have_spaces_and_escaped_signs(
    beginning: str, parameter: str
) -> None:
    template = json.loads((OWN / "qwen3_5.json").read_text("utf-8"))
    pattern = rf"{beginning}(?P<key>\w+)\"?>(?P<value>.*?)</argument>"
    template["fields"]["tool_calls"]["content_args"]["tag_pattern"] = pattern
    found = ResponseFormat.of(template)
    good, broken = parameter.format("q", "7 a"), parameter.format("k k", "3")
    (call,) = parse_turn(QWEN_CALL.format(good), found, tools=TOOLS).calls
    assert json.loads(call.arguments) == {"q": "7 a"}
    turn = parse_turn(QWEN_CALL.format(good + broken), found, tools=TOOLS)
    assert turn.calls == () and "a parameter that cannot be read" in turn.malformed[0]


def test_a_pattern_without_a_fixed_beginning_reads_what_it_matches() -> None:
    found = ResponseFormat.of(json.loads((OWN / "lfm2_2_5.json").read_text("utf-8")))
    text = "<|tool_call_start|>[find(q='a, b=c', k=3)]<|tool_call_end|>"
    (call,) = parse_turn(text, found, tools=TOOLS).calls
    assert json.loads(call.arguments) == {"q": "a, b=c", "k": 3}


@pytest.mark.parametrize(
    ("schema", "written", "expected"),
    [
        ({"type": ["string", "null"]}, "123", "123"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "123", "123"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "123", 123),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"type": ["null", "array"]}, "[1]", [1]),
        (True, "123", "123"),
    ],
)
@pytest.mark.parametrize("own", ["qwen3", "qwen3_5"])
def test_a_text_gets_the_type_of_a_schema_with_several(
    own: str, schema: Any, written: str, expected: Any
) -> None:
    """The value is a JSON string in the first template, and has no type in the second."""
    call = QWEN_CALL.format(f"<parameter=q>\n{written}\n</parameter>")
    if own == "qwen3":
        called = {"name": "find", "arguments": {"q": written}}
        call = f"<tool_call>{json.dumps(called)}</tool_call>"
    found = ResponseFormat.of(json.loads((OWN / f"{own}.json").read_text("utf-8")))
    parameters = {"type": "object", "properties": {"q": schema}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    turn = parse_turn(call, found, tools=tools)
    assert [json.loads(one.arguments) for one in turn.calls] == [{"q": expected}]


def test_m11_calls_in_a_thought_that_the_prompt_begins_are_none() -> None:
    own = ResponseFormat.of(json.loads((OWN / "qwen3_5.json").read_text("utf-8")))
    call = "<tool_call>\n<function=find>\n<parameter=q>\n7\n</parameter>\n</function>\n</tool_call>"
    header = "<|im_start|>assistant\n"
    begun = parse_turn(f"{call}</think>done", own, tools=TOOLS, prompt=f"{header}<think>\n")
    assert begun.calls == () and begun.text == f"{call}</think>done"
    assert len(parse_turn(call, own, tools=TOOLS, prompt=header).calls) == 1
    shown = parse_turn(call, own, tools=TOOLS, prompt="the tools: <tool_call>")
    assert len(shown.calls) == 1, "a prompt without the beginning of a turn is not read"


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("text", "is not valid"),
        ({"fields": {}}, "is not valid"),
        ({"fields": {"content": {}}}, "is not valid"),
        ({"start_anchor": "x", "fields": {"content": {}}}, "without tool_calls"),
        ({"start_anchor": "x", "fields": {"tool_calls": {}}}, "without tool_calls"),
        (
            {"start_anchor": "x", "fields": {"tool_calls": {"open": "[", "close": "]"}}},
            "does not read the calls",
        ),
    ],
)
def test_a_response_template_that_cannot_be_used_is_refused(written: Any, fault: str) -> None:
    codec = codec_with("qwen3", own=False)
    codec.tokenizer.response_template = written
    with pytest.raises(NoFormat, match=fault):
        find_format(codec, TOOLS)


def without_calls(template: dict[str, Any], said: str) -> str:
    """Return a text without its calls, by trying every beginning of a field at each character."""

    def pattern_of(field: dict[str, str], side: str) -> Any:
        literal = field.get(side)
        written = field.get(f"{side}_pattern") if literal is None else regex.escape(literal)
        return None if written is None else regex.compile(written, regex.DOTALL)

    sides = {
        name: (begin, pattern_of(field, "close"))
        for name, field in template["fields"].items()
        if (begin := pattern_of(field, "open")) is not None
    }
    kept, position = "", 0
    while position < len(said):
        begun = [
            (match.end(), name)
            for name, (begin, _) in sides.items()
            if (match := begin.match(said, position)) is not None
        ]
        name, end = None, position + 1
        if begun:
            inside, name = max(begun)
            close = sides[name][1].search(said, inside)
            end = len(said) if close is None else close.end()
        if name != "tool_calls":
            kept += said[position:end]
        position = end
    return kept


@pytest.mark.parametrize("own", sorted({*CHATS.values()}))
def test_random_texts_end_and_nothing_of_them_is_lost(own: str) -> None:
    """Delimiters in any order: the text is what was said without its calls."""
    template = json.loads((OWN / f"{own}.json").read_text("utf-8"))
    found = ResponseFormat.of(template)
    text = json.dumps(template, ensure_ascii=False)
    pieces = ["<think>", "</think>", "<tool_call>", "</tool_call>", "x", '{"a": 1}', text[:40]]
    pieces += ["<|channel|>commentary", "<|call|>", "<|tool_call>call:find", "<tool_call|>", ","]
    pieces += ["<tool_call>\n<function=find>", "<|tool_call_start|>[find(", ")]<|tool_call_end|>"]
    pieces += ["to=functions.find<|channel|>commentary json<|message|>", "}<|eot_id|>"]
    pieces += ['{"name": "find", "parameters": ', "<|channel>thought\n", "<channel|>", "\n"]
    rng = random.Random(0)
    mixed = 0
    for _ in range(300):
        said = "".join(rng.choice(pieces) for _ in range(rng.randint(0, 12)))
        parts = found.split(said, tools=TOOLS)
        assert parts.text == without_calls(template, said), said
        assert (parts.text == said) == (not parts.calls and not parts.malformed), said
        mixed += 0 < len(parts.text) < len(said)
    assert mixed > 10, "texts with a call and something else"
