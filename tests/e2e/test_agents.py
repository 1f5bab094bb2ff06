# SPDX-License-Identifier: Apache-2.0
"""Runs with tools through the public configuration, and inputs that are refused before training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.config.derived.pools import place_run
from tandem.config.parse.overrides import load_config
from tandem.config.plan.plan import describe_run
from tandem.config.schema.run import RunConfig
from tandem.driver import train
from tandem.driver.launch import local_site
from tandem.driver.run import run_prepared
from tandem.errors import UserError
from tandem.quickstart import materials as module
from tandem.quickstart.calculator import CALCULATOR, CALCULATOR_FILE
from tandem.quickstart.materials import Materials, prepare
from tests.fakes.tiny_run import metrics_of

GRPO = str(Path(module.__file__).parent / "grpo.yaml")
ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{ROLLOUT}.multi_turn"


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NUM_DEMONSTRATIONS", "NUM_TRAIN", "NUM_TEST", "NUM_UNSEEN"):
            patch.setattr(module, name, 16)
        patch.setattr(module, "NUM_TOKENIZER_TEXTS", 200)
        return prepare(tmp_path_factory.mktemp("calculator"), seed=0, task=CALCULATOR)


def configured(materials: Materials, folder: Path, *overrides: str) -> RunConfig:
    keys = (
        f"actor_rollout_ref.model.path={materials.model}",
        f"data.train_files={materials.train}",
        f"data.val_files={materials.test}",
        f"trainer.default_local_dir={folder}",
        "data.train_batch_size=4",
        "data.max_response_length=24",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{ROLLOUT}.n=2",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
    )
    config = load_config(RunConfig, [GRPO, *keys, *overrides]).config
    assert place_run(config).is_one_process
    return config


WITH_TOOL = (f"{TURNS}.enable=True", f"{TURNS}.function_tool_path={CALCULATOR_FILE}")


def train_on(config: RunConfig) -> None:
    ended = run_prepared(local_site(config), train.prepare(config))
    assert ended.exit_code == 0


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
    assert described["tools"] == f"{CALCULATOR_FILE}; calls as hermes"
    assert described["episodes"] == "at most 3 answers, 24 tokens, drawn and given"
    assert described["deadlines"] == "30 s a call, 600 s an episode, in up to 8 processes"
    assert "tools" not in describe_run(configured(materials, tmp_path))
