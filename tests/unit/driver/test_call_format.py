# SPDX-License-Identifier: Apache-2.0
"""The form of calls of a run: what ``auto`` finds, and what is refused before training."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.data.response_format import RESPONSE_TEMPLATE
from tandem.data.tokenizer import TextCodec
from tandem.driver.agents import choose_format
from tandem.errors import UserError
from tests.fakes.made_tokenizers import codec_for

TOOL = {"type": "function", "function": {"name": "calc", "description": "d", "parameters": {}}}
QWEN3 = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        }
    },
}


def chosen(
    template: str,
    name: str,
    *,
    response_template: Any = None,
    tools: Any = (TOOL,),
    has_programs: bool = False,
) -> str:
    made = codec_for(template)
    codec = TextCodec(copy(made.tokenizer), eos_ids=made.eos_ids)
    codec.tokenizer.response_template = response_template
    rollout: Any = SimpleNamespace(multi_turn=SimpleNamespace(format=name))
    return choose_format(rollout, codec, tools=tools, has_programs=has_programs)[1]


def test_auto_takes_the_response_template_or_the_form_of_the_chat_template():
    assert chosen("qwen3", "auto", response_template=QWEN3) == f"auto: {RESPONSE_TEMPLATE}"
    assert chosen("qwen3", "auto") == "auto: hermes"
    assert chosen("glm4moe", "auto") == "auto: glm"
    assert chosen("qwen3", "seed") == "seed", "a form that is named is taken"


def test_a_tokenizer_whose_calls_cannot_be_read_is_refused_in_one_line():
    with pytest.raises(UserError, match=r"format='auto': .*Set one of hermes, gpt-oss") as error:
        chosen("llama3_1", "auto")
    assert "\n" not in str(error.value)
    wrong = {**QWEN3, "start_anchor": ""}
    with pytest.raises(UserError, match="response_template that is not valid"):
        chosen("qwen3", "auto", response_template=wrong)


@pytest.mark.parametrize(
    "written",
    [{"tag_pattern": "(?P<key>"}, ["x"], {"tag_pattern": "(?P<key>c)", "value_parser": "x"}],
)
def test_a_response_template_with_wrong_arguments_is_refused_in_one_line(written: Any):
    calls = {**QWEN3["fields"]["tool_calls"], "content": "xml-inline", "content_args": written}
    wrong = {**QWEN3, "fields": {"tool_calls": calls}}
    with pytest.raises(UserError, match="response_template that does not read the calls") as error:
        chosen("qwen3", "auto", response_template=wrong)
    assert "\n" not in str(error.value)


def test_a_run_without_tools_of_its_own_needs_no_form(caplog: pytest.LogCaptureFixture):
    assert chosen("llama3_1", "auto", tools=()) == "auto: hermes, as no other is known"
    assert not caplog.messages


def test_programs_that_may_bring_tools_are_warned_of_a_form_that_is_not_known(
    caplog: pytest.LogCaptureFixture,
):
    named = chosen("llama3_1", "auto", tools=(), has_programs=True)
    assert named == "auto: hermes, as no other is known"
    (line,) = caplog.messages
    assert "writes calls in none of the known formats" in line and "are read as hermes" in line
    assert "multi_turn.format=auto" in line and "Set one of hermes, gpt-oss" in line
    caplog.clear()
    assert chosen("qwen3", "auto", tools=(), has_programs=True) == "auto: hermes"
    assert not caplog.messages, "a form that was found"


def test_a_token_on_which_the_model_does_not_stop_is_refused():
    with pytest.raises(UserError, match=r"format='kimi': .*<\|im_end\|>, which is no end token"):
        chosen("llama3_1", "kimi")
