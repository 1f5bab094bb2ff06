# SPDX-License-Identifier: Apache-2.0
"""Runs whose agents are programs: the openai client as it is, and a command (M24)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from tandem.driver import train
from tandem.errors import RunFailure, UserError
from tandem.quickstart.materials import Materials
from tests.fakes.calculator_run import configured, train_on, write_materials
from tests.fakes.tiny_run import metrics_of

ROLLOUT = "actor_rollout_ref.rollout"
AGENT = f"{ROLLOUT}.agent"
FUNCTION = """
from openai import AsyncOpenAI

MORE = {"role": "user", "content": "and then?"}


async def solve(task, endpoint, num_tokens):
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        async def ask(messages):
            answer = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=num_tokens, temperature=0.2
            )
            return answer.choices[0].message

        messages = list(task.messages)
        said = await ask(messages)
        await ask([*messages, said, MORE])
        await ask([*messages, MORE])
    return {"reward": float(len(said.content)), "length": len(said.content)}
"""
COMMAND = """
import json, os, sys, urllib.request

task = json.load(sys.stdin)
fields = {"messages": task["messages"], "max_tokens": 4, **json.loads(sys.argv[1])}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(fields).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    print(json.load(answer)["choices"][0]["message"]["content"])
print(json.dumps({"reward": 1.0}))
"""


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    return write_materials(tmp_path_factory.mktemp("calculator"))


def agents_file(folder: Path, entry: dict[str, object]) -> tuple[str, ...]:
    (folder / "made_program.py").write_text(FUNCTION)
    (folder / "command.py").write_text(COMMAND)
    file = folder / "agents.yaml"
    # The rows of the quickstart name tool_agent.
    file.write_text(json.dumps([{"name": "tool_agent", **entry}]))
    sizes = ("data.max_response_length=80", f"{AGENT}.num_workers=1")
    return (f"{AGENT}.agent_loop_config_path={file}", *sizes)


def command(folder: Path, **fields: object) -> dict[str, object]:
    script = str(folder / "command.py")
    return {"kind": "command", "argv": [sys.executable, script, json.dumps(fields)]}


@pytest.mark.parametrize("ahead", [0, 1])
def test_m24_the_openai_client_as_it_is_trains_on_what_was_drawn(
    materials: Materials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ahead: int,
) -> None:
    """The trainer's log-probs of the recorded tokens are the rollout's: they are the same ids."""
    monkeypatch.syspath_prepend(str(tmp_path))
    entry = {"_target_": "made_program.solve", "num_tokens": 6, "reward": "agent"}
    keys = [
        *agents_file(tmp_path, entry),
        "algorithm.rollout_correction.bypass_mode=False",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    if ahead:
        keys += ["trainer.async_pipeline=True", f"trainer.generate_ahead_steps={ahead}"]
    before = set(psutil.Process().children(recursive=True))
    train_on(configured(materials, tmp_path / "run", *keys))
    rows = metrics_of(tmp_path / "run")
    for step in (1, 2):
        row = rows[step]
        assert row["agent/end/done"] == 1 and row["agent/failed"] == 0
        assert row["num_turns/mean"] == 6
        assert row["agent/forks/compacted"] == 8, "one of each sample"
        assert row["reward/length/mean"] == row["critic/score/mean"]
        assert 0 < row["agent/drawn_tokens/mean"] <= 18
        assert ahead or row["training/rollout_logp_diff_max"] < 5e-5
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_command_is_trained_and_scored_by_the_rule(
    materials: Materials,
    tmp_path: Path,
) -> None:
    keys = agents_file(tmp_path, command(tmp_path))
    train_on(configured(materials, tmp_path / "run", *keys, "trainer.total_training_steps=1"))
    row = metrics_of(tmp_path / "run")[1]
    assert (row["agent/end/done"], row["agent/failed"], row["critic/score/mean"]) == (1, 0, 0)


def test_a_run_whose_agents_all_fail_ends_with_the_cause(
    materials: Materials,
    tmp_path: Path,
) -> None:
    keys = agents_file(tmp_path, command(tmp_path, n=2))
    with pytest.raises(BaseException) as caught:  # noqa: B017, PT011
        train_on(configured(materials, tmp_path / "run", *keys, "trainer.val_before_train=False"))
    failures = [caught.value]
    while failures and not isinstance(failures[0], RunFailure):
        failures = [*getattr(failures[0], "exceptions", ()), *failures[1:]]
    assert "the endpoint refused: n=2 is not supported" in str(failures[0])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([f"{AGENT}.default_agent_loop=other"], "default_agent_loop='other': is no agent of the"),
        ([f"{AGENT}.endpoint=0.0.0.0:80"], "is not an address of this machine alone"),
        (
            [f"{ROLLOUT}.multi_turn.function_tool_path=tools.py"],
            "has an agent of the name tool_agent, which the run has already",
        ),
    ],
)
def test_agents_that_cannot_be_are_refused_before_training(
    materials: Materials,
    tmp_path: Path,
    keys: list[str],
    message: str,
) -> None:
    own = agents_file(tmp_path, command(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        train.prepare(configured(materials, tmp_path / "run", *own, *keys))
    assert "\n" not in str(caught.value)
