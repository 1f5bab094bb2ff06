# SPDX-License-Identifier: Apache-2.0
"""What a plan says about the agents of a run, from templates that show tools and drop thoughts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from tandem.data.dialogue import TOOL, USER, Dialogue
from tandem.driver.agent_facts import describe_agents
from tests.fakes.made_tokenizers import codec_for


def schema(name: str) -> dict[str, Any]:
    properties = {"a": {"type": "integer", "description": "A number."}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def described(template: str, *, renders_anew: bool = False) -> dict[str, str]:
    codec = codec_for(template)
    schemas = (schema("add"), schema("subtract"))
    plan: Any = SimpleNamespace(
        schemas=schemas,
        format_name="auto: hermes",
        facts=Dialogue(codec, schemas).probe([TOOL, USER]),
        renders_anew=renders_anew,
        protections=(),
        notes=("a note",),
    )
    rows: Any = [SimpleNamespace(agent=agent) for agent in ("tool_agent", "", "tool_agent")]
    return dict(describe_agents(plan, codec=codec, train=rows, validation=rows[:1]))


def test_rows_and_schemas_are_counted():
    told = described("qwen3")
    assert told["agents of the rows"] == "tool_agent: 2 rows, single_turn_agent: 1 rows"
    assert told["agents of the validation"] == "tool_agent: 1 rows"
    found = re.fullmatch(
        r"(\d+) tokens of a prompt \(add (\d+), subtract (\d+), each by itself\)",
        told["schemas of the tools"],
    )
    assert found is not None
    both, add, subtract = map(int, found.groups())
    # The words around the schemas are counted once in a prompt with both.
    assert 20 < max(add, subtract) < both < add + subtract
    assert told["of the files of tools"] == "a note"
    assert told["form of calls"] == "auto: hermes"


def test_what_the_template_does_with_earlier_turns_is_told():
    kept = "keeps all tokens before it, so that turns are appended exactly"
    assert described("qwen2_5")["template, user"] == kept
    told = described("qwen3")
    assert told["template, tool"] == kept
    assert told["template, user"].endswith("still sees: tokens are appended")
    assert described("qwen3", renders_anew=True)["template, user"].endswith("forks there")
    assert "see tokenization_sanity_check_mode" in described("phi3")["template, tool"]


def test_a_run_without_agents_has_no_facts():
    assert describe_agents(None, codec=codec_for("qwen3"), train=[], validation=[]) == {}
