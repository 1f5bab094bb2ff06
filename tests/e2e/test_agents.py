# SPDX-License-Identifier: Apache-2.0
"""Runs with tools through the public configuration, and inputs that are refused before training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.config.plan.plan import describe_run
from tandem.driver import train
from tandem.errors import RunFailure, UserError
from tandem.quickstart.calculator import CALCULATOR_FILE
from tandem.quickstart.materials import Materials
from tests.fakes.calculator_run import configured, let_turns_end, train_on, write_materials
from tests.fakes.tiny_run import metrics_of

ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return write_materials(tmp_path_factory.mktemp("calculator"))


WITH_TOOL = (f"{TURNS}.enable=True", f"{TURNS}.function_tool_path={CALCULATOR_FILE}")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_with_a_tool_trains_and_logs_turns(
    materials: Materials, tmp_path: Path, mode: str
) -> None:
    ahead = ("trainer.async_pipeline=True", "trainer.generate_ahead_steps=1")
    train_on(configured(materials, tmp_path, *WITH_TOOL, *(ahead if mode == "async" else ())))
    rows = metrics_of(tmp_path)
    for step in (1, 2):
        assert rows[step]["num_turns/min"] >= 2
        assert sum(v for k, v in rows[step].items() if k.startswith("agent/end/")) == 1
        assert rows[step]["agent/failed"] == 0
    assert rows[0]["val-aux/num_turns/min"] >= 2
    recorded = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").open()]
    assert all(len(row["tokens"]) == len(row["log_probs"]) for row in recorded)
    for row in recorded:
        assert "".join(span["text"] for span in row["spans"]) == "".join(row["tokens"])
        assert [span["drawn"] for span in row["spans"]] == [
            span["role"] == "assistant" for span in row["spans"]
        ]


def test_a_run_with_an_environment_of_a_server_trains(materials: Materials, tmp_path: Path) -> None:
    """The policy has learned nothing, so that its actions are wrong, and its rewards 0."""
    server = Path(__file__).parents[1] / "fakes" / "openenv_server.py"
    argv = [sys.executable, str(server), "3"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        url = f"http://127.0.0.1:{running.stdout.readline().strip()}"
        agents = tmp_path / "agents.yaml"
        agents.write_text(
            f"- {{name: tool_agent, kind: openenv, url: '{url}', action_field: guess}}"
        )
        keys = (f"{ROLLOUT}.agent.agent_loop_config_path={agents}", "data.max_prompt_length=200")
        try:
            train_on(configured(materials, tmp_path, *keys, "data.max_response_length=300"))
        finally:
            running.kill()
    rows = metrics_of(tmp_path)
    assert [rows[step]["agent/failed"] for step in (1, 2)] == [0, 0]
    recorded = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").open()]
    told = [span["text"] for row in recorded for span in row["spans"] if not span["drawn"]]
    assert any("The action is wrong: guess" in text for text in told)
    assert {row["score"] for row in recorded} == {0.0}


RAISING = """
from verl.interactions.base import BaseInteraction


class Raising(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        raise KeyError("gone")
"""


def test_m14_a_run_whose_environments_all_raise_ends_with_the_cause(
    materials: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    monkeypatch.syspath_prepend(str(tmp_path))
    users = tmp_path / "users.yaml"
    users.write_text("interaction: [{name: raising, class_name: raising.Raising, config: {}}]")
    rows = pq.read_table(materials.train).to_pylist()
    for row in rows:
        row["extra_info"]["interaction_kwargs"] = {"name": "raising"}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    let_turns_end(shutil.copytree(materials.model, tmp_path / "model"))
    keys = (
        f"{TURNS}.interaction_config_path={users}",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.max_response_length=80",
        "trainer.val_before_train=False",
    )
    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011
        train_on(configured(materials, tmp_path / "run", *keys))
    (failure,) = run_failures(caught.value)
    assert "KeyError: 'gone' (raising.py:7)" in failure and "\n" not in failure
    logged = (tmp_path / "run" / "environments.log").read_text()
    assert "the simulated user: KeyError: 'gone' (raising.py:7)\n" in logged


def run_failures(error: BaseException) -> list[str]:
    """Return the failures of the run that an error holds."""
    if isinstance(error, RunFailure):
        return [str(error)]
    return [text for one in getattr(error, "exceptions", ()) for text in run_failures(one)]


REFUSED: Sequence[tuple[tuple[str, ...], str]] = (
    ((f"{TURNS}.enable=True",), "multi_turn.enable=True: there are neither tools nor simulated"),
    ((), "row 0 names the agent tool_agent, and the run has no tools"),
    ((f"{TURNS}.function_tool_path=no.py",), r"function_tool_path='no.py': no such file"),
    ((f"{TURNS}.tool_config_path=no.yaml",), r"tool_config_path='no.yaml': no such file"),
    ((*WITH_TOOL, f"{TURNS}.format=glm"), r"format='glm': calls of this form end with"),
    (
        (*WITH_TOOL, f"{ROLLOUT}.agent.environment=[NO_SUCH_KEY]"),
        "agent.environment=.*NO_SUCH_KEY",
    ),
    (
        (
            *WITH_TOOL,
            "actor_rollout_ref.model.custom_chat_template="
            '"{% for m in messages %}{{ m.content }}{% endfor %}"',
        ),
        "the chat template of .* tried with a tool message, drops the calls of a turn",
    ),
)


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_input_is_refused_before_training(
    materials: Materials, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    config = configured(materials, tmp_path, *overrides)
    with pytest.raises(UserError, match=message) as caught:
        train.prepare(config)
    assert "\n" not in str(caught.value)


def test_the_plan_names_tools_bounds_and_deadlines(materials: Materials, tmp_path: Path) -> None:
    keys = (*WITH_TOOL, f"{TURNS}.max_user_turns=3")
    described = describe_run(configured(materials, tmp_path, *keys))
    assert described["tools and agents"] == f"{CALCULATOR_FILE}; calls as hermes"
    assert described["episodes"] == "at most 3 answers, 24 tokens, drawn and given"
    assert described["deadlines"] == "30 s a call, 600 s an episode, in up to 8 processes"
    assert "tools and agents" not in describe_run(configured(materials, tmp_path))


def test_the_plan_counts_rows_and_tokens_and_tells_what_the_template_does(
    materials: Materials, tmp_path: Path
) -> None:
    described = train.prepare(configured(materials, tmp_path, *WITH_TOOL)).described
    assert described["agents of the rows"].startswith("tool_agent: ")
    assert described["agents of the validation"].startswith("tool_agent: ")
    told = "none in a prompt: the chat template does not show them"
    assert described["schemas of the tools"] == told
    assert (
        described["template, tool"]
        == "keeps all tokens before it, so that turns are appended exactly"
    )


def test_the_plan_tells_what_holds_code_and_what_of_a_file_is_replaced(
    materials: Materials, tmp_path: Path
) -> None:
    tools = tmp_path / "tools.yaml"
    tools.write_text(
        "tools:\n  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool\n"
        "    config: {type: native, rate_limit: 4}\n"
    )
    keys = (f"{TURNS}.enable=True", f"{TURNS}.tool_config_path={tools}")
    isolation = f"{ROLLOUT}.agent.isolation=best_effort"
    described = train.prepare(configured(materials, tmp_path, *keys, isolation)).described
    assert "memory (rlimits)" in described["code of the policy"]
    assert described["of the files of tools"].endswith("without effect: rate_limit")
