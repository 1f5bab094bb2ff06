# SPDX-License-Identifier: Apache-2.0
"""The YAML files of tools and of simulated users."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.agents.tool_files import read_interaction_file, read_tool_file
from tandem.errors import UserError

BAD_FILES = {
    "tools: [": "is not valid YAML",
    "tool: []": "has no list under 'tools'",
    "tools: [{config: {}}]": r"tools\[0\] has no class_name",
    "tools: [{class_name: a.B, confg: {}}]": r"tools\[0\] has an unknown field 'confg'",
    "tools: [{class_name: a.B, 1: 2, zoo: 3}]": r"tools\[0\] has an unknown field 1\.",
    "tools: &a [*a]": "is not valid YAML .a value contains itself, or is nested too deeply",
    "tools: [{class_name: '${oc.env:NO_VARIABLE}'}]": "without a value .*NO_VARIABLE.*Export",
    "tools: [{class_name: B}]": "is not package.module.Class",
    "tools: [{config: {type: mcp}}]": "has no mapping mcp with servers",
    "tools: [{class_name: a.B, config: {type: x}}]": "the type is 'x', with the fields class_name",
    "tools: [{class_name: a.B, tool_schema: {type: function}}]": "has no function with a name",
}


@pytest.mark.parametrize("text", BAD_FILES)
def test_yaml_files_with_mistakes(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"tool_config_path=.*{BAD_FILES[text]}"):
        read_tool_file(str(file))


def test_m8_yaml_of_verl_is_read_as_it_is(tmp_path: Path) -> None:
    """The spelling ``item`` of verl's search example is kept, as schemas may have any field."""
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools:\n"
        '  - class_name: "verl.tools.search_tool.SearchTool"\n'
        "    config:\n      retrieval_service_url: http://127.0.0.1:8000/retrieve\n"
        "      num_workers: 120\n      timeout: 30\n      type: native\n"
        "    tool_schema:\n      type: function\n      function:\n        name: search\n"
        "        description: Searches.\n        parameters:\n          type: object\n"
        "          properties:\n            query_list:\n              type: array\n"
        "              item:\n                type: string\n              description: d\n"
        "          required:\n            - query_list\n"
    )
    (spec,) = read_tool_file(str(file)).classes
    assert spec.config["timeout"] == 30 and spec.config["type"] == "native"
    assert spec.schema is not None
    properties = spec.schema["function"]["parameters"]["properties"]
    assert properties["query_list"]["item"] == {"type": "string"}
    users = tmp_path / "users.yaml"
    users.write_text(
        'interaction:\n  - name: "gsm8k"\n'
        '    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"\n    config: {}\n'
        '  - class_name: "a.b.WeatherInteraction"\n    config: {}\n'
    )
    assert [one.name for one in read_interaction_file(str(users))] == ["gsm8k", "weather"]
