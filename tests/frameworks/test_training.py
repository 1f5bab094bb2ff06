# SPDX-License-Identifier: Apache-2.0
"""Agents of frameworks, unchanged, in runs of a model that has learned to call a tool (M25).

The trainer's log-probs of the recorded tokens are the rollout's: they are the tokens that it drew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tandem.quickstart.materials import Materials
from tests.fakes.calculator_run import configured, train_on
from tests.fakes.calling_model import conversation, write_calling_model
from tests.fakes.tiny_run import metrics_of, read_lines

pytest.importorskip("smolagents", reason="needs smolagents: make test-frameworks")
pytest.importorskip("langgraph.prebuilt", reason="needs langgraph: make test-frameworks")
ROLLOUT = "actor_rollout_ref.rollout"
QUESTION = "What is 6 times 7?"
AGENTS = '''
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def with_langgraph(task, endpoint):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(model="policy", base_url=endpoint.base_url, api_key=endpoint.api_key)
    question = {"messages": [("user", task.messages[0]["content"])]}
    limits = {"recursion_limit": 20}
    said = create_react_agent(model, [multiply]).invoke(question, limits)["messages"]
    return float(said[-1].content.endswith("42"))


def with_smolagents(task, endpoint):
    import smolagents

    model = smolagents.OpenAIModel(
        "policy", api_base=endpoint.base_url, api_key=endpoint.api_key
    )
    agent = smolagents.ToolCallingAgent(
        tools=[smolagents.tool(multiply)], model=model, verbosity_level=0, max_steps=2,
        prompt_templates=SHORT,
    )
    agent.run(task.messages[0]["content"])
    return 1.0


SHORT = {
    "system_prompt": "",
    "planning": {
        "initial_plan": "",
        "update_plan_pre_messages": "",
        "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "", "post_messages": ""},
}
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    learned = conversation(
        QUESTION, "multiply", arguments={"a": 6, "b": 7}, result="42", answer="It is 42"
    )
    # smolagents puts words of its own before the question.
    asked = [
        {"role": "system", "content": ""},
        {"role": "user", "content": f"New task:\n{QUESTION}"},
    ]
    in_words = {"messages": [*asked, *learned["messages"][1:]]}
    return write_calling_model(tmp_path_factory.mktemp("calling"), [learned, in_words])


@pytest.mark.parametrize(("agent", "num_forks"), [("with_langgraph", 0), ("with_smolagents", None)])
def test_m25_an_agent_of_a_framework_is_trained_on_what_was_drawn(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    agent: str,
    num_forks: int | None,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "framework_agents.py").write_text(AGENTS)
    entry = {"name": "own", "_target_": f"framework_agents.{agent}", "reward": "agent"}
    (tmp_path / "agents.yaml").write_text(json.dumps([entry]))
    row = {"prompt": [{"role": "user", "content": QUESTION}], "agent_name": "own"}
    pq.write_table(pa.Table.from_pylist([row] * 8), tmp_path / "rows.parquet")
    run = tmp_path / "run"
    keys = (
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.val_files=[]",
        "data.max_prompt_length=2000",
        "data.max_response_length=160",
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path / 'agents.yaml'}",
        f"{ROLLOUT}.agent.num_workers=1",
        "algorithm.rollout_correction.bypass_mode=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.val_before_train=False",
    )
    train_on(configured(Materials(model, run, run, run, run, 0), run, *keys))
    rows = metrics_of(run)
    for step in (1, 2):
        assert rows[step]["agent/failed"] == 0 and rows[step]["num_turns/mean"] > 2
        assert rows[step]["training/rollout_logp_diff_max"] < 5e-5
        forks = sum(v for k, v in rows[step].items() if k.startswith("agent/forks/"))
        assert (forks == num_forks) if num_forks is not None else forks > 0
    spans = [span for row in read_lines(run / "rollouts.jsonl") for span in row["spans"]]
    drawn = [span["text"] for span in spans if span["drawn"]]
    assert any('"name": "multiply"' in text for text in drawn)
