# SPDX-License-Identifier: Apache-2.0
"""Turns are parsed from their tokens, what the prompt has begun, and the token that ends them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tandem.data.call_formats import CALL_FORMATS, CallFormat
from tandem.data.response_format import ResponseFormat
from tandem.pipeline.conversing import Conversing, TurnLimits
from tandem.types import AssistantTurn
from tests.fakes import made_tokenizers
from tests.fakes.made_tokenizers import codec_for

OWN = Path(made_tokenizers.__file__).parent / "response_templates"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "find", "parameters": {"properties": {}}}}
]


def parsed(
    template: str, call_format: CallFormat, text: str, *, before: str = "", stop: str = ""
) -> AssistantTurn:
    codec = codec_for(template)
    pool: Any = None
    conversing = Conversing(codec, pool, call_format, {}, TurnLimits(None, None, 60.0))
    turn_ids, after = codec.encode([text, before])
    return conversing.parse(turn_ids, after=after, tools=TOOLS, first_call=0, stop=stop)


def calls(turn: AssistantTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.calls]


def test_a_token_that_ends_the_turn_may_end_a_call():
    text = '<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"q": 7}<|call|>'
    turn = parsed("gptoss", CALL_FORMATS["gpt-oss"], text)
    assert calls(turn) == [("find", {"q": 7})] and not turn.malformed and turn.text == ""
    first = ' to=functions.find<|channel|>commentary json<|message|>{"q": 7}<|call|>'
    assert calls(parsed("gptoss", CALL_FORMATS["gpt-oss"], first)) == [("find", {"q": 7})]
    own = ResponseFormat.of(json.loads((OWN / "gptoss.json").read_text("utf-8")))
    assert calls(parsed("gptoss", own, first)) == [("find", {"q": 7})]


def test_a_thought_that_the_prompt_begins_holds_no_calls():
    own = ResponseFormat.of(json.loads((OWN / "qwen3_5.json").read_text("utf-8")))
    call = "<tool_call>\n<function=find>\n<parameter=q>\n7\n</parameter>\n</function>\n</tool_call>"
    header = "<|im_start|>user\n<tool_call><|im_end|>\n<|im_start|>assistant\n"
    text = f"{call}</think>done<|im_end|>"
    turn = parsed("qwen3_5_think", own, text, before=f"{header}<think>\n")
    assert turn == AssistantTurn(f"{call}</think>done")
    assert calls(parsed("qwen3_5_think", own, f"{call}<|im_end|>", before=header)) == [
        ("find", {"q": "7"})
    ]


def test_what_follows_a_stop_text_is_no_part_of_the_turn():
    turn = parsed("qwen3", CALL_FORMATS["hermes"], "It is 42.\nObservation: x", stop="\nObserv")
    assert turn == AssistantTurn("It is 42.")
