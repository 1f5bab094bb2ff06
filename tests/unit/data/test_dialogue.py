# SPDX-License-Identifier: Apache-2.0
"""The tokens between turns on real templates (M1, M2, M6 of the specification of agents).

The tokenizers are made for each template, with its own special tokens.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tandem.data.call_formats import result_message
from tandem.data.dialogue import TOOL, TWO_TOOLS, USER, Dialogue, DialogueRefused
from tandem.data.tokenizer import TextCodec
from tests.fakes.made_tokenizers import TEMPLATES, codec_for

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"e": {"type": "string", "description": "x"}},
                "required": ["e"],
            },
        },
    }
]
QUESTION = {"role": "user", "content": "six times seven?"}
DROPS_CALLS = "drops the calls of a turn"
ONE_CALL = "only supports single tool-calls at once"
EXACT, INEXACT_USER = ("", "", True), ("", "", False)
FACTS = {
    "cohere2": ("drops a message", "drops a message", True),
    "deepseekv3": EXACT,
    "diffusion_gemma": INEXACT_USER,
    "gemma": ("must alternate", "must alternate", True),
    "gemma3": ("must alternate", "must alternate", True),
    "glm4moe": INEXACT_USER,
    "gptoss": INEXACT_USER,
    "lfm2": (DROPS_CALLS, DROPS_CALLS, True),
    "lfm2_2_5": EXACT,
    "llama3": (DROPS_CALLS, DROPS_CALLS, True),
    "llama3_1": ("", ONE_CALL, True),
    "llama3_2": ("", ONE_CALL, True),
    "nemotron_3_nano": INEXACT_USER,
    "nemotron_3_super": INEXACT_USER,
    "nemotron_3_ultra": INEXACT_USER,
    "phi3": ("drops a message", "drops a message", False),
    "phi3_5": ("drops a message", "drops a message", False),
    "qwen2_5": EXACT,
    "qwen2_5_vl": (DROPS_CALLS, DROPS_CALLS, True),
    "qwen3": INEXACT_USER,
    "qwen3_5_nothink": INEXACT_USER,
    "qwen3_5_think": INEXACT_USER,
    "qwen3_6": INEXACT_USER,
    "qwen3_instruct_2507": EXACT,
    "qwen3_vl": EXACT,
}
"""For each template: the faults after one and after two calls, and whether it appends a user's
message without changing what stands before."""
WITH_TOOLS = [name for name, facts in FACTS.items() if facts[0] == ""]
APPENDING = [name for name, facts in FACTS.items() if facts[2] and name != "deepseekv3"]
WITH_TWO = [name for name in WITH_TOOLS if FACTS[name][1] == ""]


def turn(name: str, count: int) -> dict[str, Any]:
    """A turn as the model writes it in the form of the template ``name``."""
    arguments = '{"e": "6*7"}' if name == "deepseekv3" else {"e": "6*7"}
    thought = {} if name == "qwen3_5_nothink" else {"reasoning_content": "r"}
    calls = [
        {
            "id": f"c{i:08d}",
            "type": "function",
            "function": {"name": "calc", "arguments": arguments},
        }
        for i in range(count)
    ]
    return {"role": "assistant", "content": "", **thought, "tool_calls": calls}


def results(count: int) -> list[dict[str, Any]]:
    return [dict(result_message(f"c{i:08d}", "calc", text=f"4{i}")) for i in range(count)]


def render(codec: TextCodec, chat: list[dict[str, Any]], *, prompts: bool) -> str:
    settings = {"tools": TOOLS}
    return codec.render([chat], generation_prompt=prompts, settings=settings)[0]


def drawn_ids(codec: TextCodec, text: str) -> list[int]:
    """The tokens of a turn up to the one that closes it."""
    ids = codec.encode([text])[0]
    ends = [i for i, token in enumerate(ids) if token in codec.eos_ids]
    if ends and not codec.decode([ids[ends[-1] + 1 :]], skip_special=False)[0].strip():
        return ids[: ends[-1] + 1]
    observation = codec.tokenizer.convert_tokens_to_ids("<|observation|>")
    return [*ids, observation] if observation in codec.eos_ids else ids


def test_m1_facts_of_all_templates() -> None:
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FACTS)
    for name, (tool, two_tools, appends) in FACTS.items():
        facts = {fact.kind: fact for fact in Dialogue(codec_for(name), TOOLS).probe()}
        for kind, fault in ((TOOL, tool), (TWO_TOOLS, two_tools)):
            found = facts[kind].fault
            assert fault in found and bool(fault) == bool(found), (name, kind, found)
        assert (facts[USER].fault, facts[USER].appends) == ("", appends), (name, facts[USER])


@pytest.mark.parametrize(
    ("name", "count"), [(n, 1) for n in WITH_TOOLS] + [(n, 2) for n in WITH_TWO]
)
def test_m1_tokens_are_those_of_the_whole_conversation(name: str, count: int) -> None:
    codec = codec_for(name)
    first = render(codec, [QUESTION], prompts=True)
    said = render(codec, [QUESTION, turn(name, count)], prompts=False)
    chat = [QUESTION, turn(name, count), *results(count)]
    whole = codec.encode([render(codec, chat, prompts=True)])[0]
    if name == "deepseekv3":  # its generation prompt opens a thought, which its turns do not show
        given = Dialogue(codec, TOOLS).between(results(count), last_id=-1)
        assert whole[-len(given) :] == given and given[0] in codec.eos_ids
        return
    assert said.startswith(first)
    drawn = drawn_ids(codec, said[len(first) :])
    given = Dialogue(codec, TOOLS).between(results(count), last_id=drawn[-1])
    assert codec.encode([first])[0] + drawn + given == whole


@pytest.mark.parametrize(
    "name", [n for n, facts in FACTS.items() if facts[2] and n != "deepseekv3"]
)
def test_m1_tokens_after_a_message_of_the_user(name: str) -> None:
    codec = codec_for(name)
    answer, more = {"role": "assistant", "content": "42"}, {"role": "user", "content": "and 2?"}
    first = render(codec, [QUESTION], prompts=True)
    said = render(codec, [QUESTION, answer], prompts=False)
    drawn = drawn_ids(codec, said[len(first) :])
    given = Dialogue(codec, TOOLS).between([more], last_id=drawn[-1])
    whole = render(codec, [QUESTION, answer, more], prompts=True)
    assert codec.encode([first])[0] + drawn + given == codec.encode([whole])[0]


def test_m6_a_template_that_drops_thoughts_appends_exactly_what_follows_the_answer() -> None:
    """After a message of the user, Qwen3's template rewrites the turn. Appending keeps it."""
    codec = codec_for("qwen3")
    given = Dialogue(codec, TOOLS).between([{"role": "user", "content": "and 2?"}], last_id=-1)
    text = "<|im_end|>\n<|im_start|>user\nand 2?<|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode([given], skip_special=False) == [text]


def test_m2_given_tokens_never_depend_on_drawn_ones() -> None:
    """10,000 random turns: invalid UTF-8, special tokens inside, each end of a turn, and none."""
    codec = codec_for("qwen3")
    dialogue = Dialogue(codec, TOOLS)
    rng = random.Random(0)
    vocabulary = len(codec.tokenizer)
    close = codec.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = [*codec.eos_ids, rng.randrange(vocabulary)]
    whole = dialogue.between(results(1), last_id=-1)
    assert whole[0] == close
    prompt = codec.encode([render(codec, [QUESTION], prompts=True)])[0]
    num_changed = 0
    for _ in range(10_000):
        drawn = [rng.randrange(vocabulary) for _ in range(rng.randint(5, 40))] + [rng.choice(ends)]
        given = dialogue.between(results(1), last_id=drawn[-1])
        assert given == (whole[1:] if drawn[-1] == close else whole)
        again = codec.encode(codec.decode([drawn], skip_special=False))[0]
        num_changed += prompt + again + given != prompt + drawn + given
    assert num_changed > 9_000, "encoding the text of a turn again must be seen to change it"


def test_a_template_without_tools_says_why() -> None:
    with pytest.raises(DialogueRefused, match="must alternate"):
        Dialogue(codec_for("gemma"), TOOLS).between(results(1), last_id=-1)
