# SPDX-License-Identifier: Apache-2.0
"""M8: commands of verl that train agents are planned as they are; their forms differ by version.

ReTool's are in tests/unit/examples/test_retool.py, and tests/e2e/test_multi_turn_commands.py trains
with those that are here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.cli.entries import spelled_out
from tandem.cli.plan import parse
from tandem.config.schema.rollout import RolloutConfig
from tandem.errors import UserError
from tests.fakes.multi_turn_commands import COMMANDS, words_of

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"
TOOL = f"{TURNS}.tool_config_path=/verl/tool_config/tool_config.yaml"


def planned(folder: Path, task: str, version: str, *keys: str) -> dict[str, Any]:
    """Return what ``tandem plan --elsewhere`` finds of an example of verl with some more keys."""
    words = ["python3", "-m", "verl.trainer.main_ppo", *words_of(task, version, folder), *keys]
    words += [f"data.{kind}_files=/data/{task}/{kind}.parquet" for kind in ("train", "val")]
    parsed = parse(spelled_out(["plan", "--elsewhere", *words])[1:])
    return json.loads(json.dumps(parsed.plan.to_dict()))


@pytest.mark.parametrize(("task", "version"), list(COMMANDS), ids=str)
def test_m8_an_example_of_each_version_is_planned(tmp_path: Path, task: str, version: str) -> None:
    plan = planned(tmp_path, task, version, TOOL)
    assert not plan["refusals"] and not plan["unknown_keys"]
    turns = plan["config"]["actor_rollout_ref"]["rollout"]["multi_turn"]
    assert turns["enable"] and turns["format"] == "hermes"
    assert turns["max_assistant_turns"] == {"gsm8k": 5, "search": 2}[task]
    reasons = plan["keys_without_effect"]
    if task == "gsm8k" and version != "0.5":
        assert "passes it over" in reasons[f"{ROLLOUT}.over_sample_rate"]
        assert f"{ROLLOUT}.mode" in reasons


def test_m8_yaml_files_of_search_name_a_form_of_calls_that_no_version_has(tmp_path: Path) -> None:
    words = words_of("search", "0.8", tmp_path)
    with pytest.raises(
        UserError, match="format='qwen': must be one of auto, hermes.* Set .*format=herm"
    ):
        parse(["--elsewhere", *words[: words.index(f"{TURNS}.format=hermes")]])


def test_m8_a_simulated_user_and_the_keys_of_a_server(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "gsm8k",
        "0.8",
        f"{TURNS}.interaction_config_path=/verl/gsm8k_interaction.yaml",
        f"{ROLLOUT}.sglang_rollout_mode=server",
        f"{ROLLOUT}.server.timeout=60",
        f"{ROLLOUT}.server.max_connections=1000",
        f"{ROLLOUT}.mode=sync",
    )
    assert not plan["refusals"] and not plan["unknown_keys"]
    reasons = " ".join(plan["keys_without_effect"])
    assert "rollout.sglang_rollout_mode" in reasons and "rollout.server" in reasons
    assert "rollout.mode" in reasons


def test_m8_names_of_verl_0_4_and_a_random_sampler_are_taken(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        "gsm8k",
        "0.5",
        TOOL,
        f"{ROLLOUT}.name=sglang_async",
        "data.sampler.class_name=RandomCurriculumSampler",
        "data.sampler.class_path=pkg://tests.utils.dataset.test_create_rl_sampler_on_cpu",
    )
    assert not plan["refusals"] and not plan["unknown_keys"]
    assert RolloutConfig.model_validate({"name": "sglang_async"}).name == "sglang"
    assert "data.shuffle=True" in plan["keys_without_effect"]["data.sampler.class_name"]
    with pytest.raises(UserError, match=r"data\.sampler\.class_name='Hardest'.*is not built"):
        planned(tmp_path, "gsm8k", "0.5", TOOL, "data.sampler.class_name=Hardest")


def test_m8_a_manager_of_agents_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    key = f"{ROLLOUT}.agent.agent_loop_manager_class=a.B"
    with pytest.raises(UserError, match="agent_loop_manager_class='a.B'"):
        planned(tmp_path, "search", "0.8", TOOL, key)
