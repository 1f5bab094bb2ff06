# SPDX-License-Identifier: Apache-2.0
"""Runs whose agents are programs: the openai client as it is, and a command (M24)."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tandem.driver import train
from tandem.errors import RunFailure, UserError
from tandem.quickstart.materials import Materials
from tests.fakes.calculator_run import configured, train_on, write_materials
from tests.fakes.tiny_run import metrics_of, read_lines

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
SHARED = """
import json, os, sys, threading, urllib.request


def play(line):
    message = json.loads(line)
    fields = {"messages": message["task"]["messages"], "max_tokens": 4}
    request = urllib.request.Request(
        message["base_url"] + "/chat/completions",
        json.dumps(fields).encode(),
        {"authorization": "Bearer " + message["api_key"]},
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.status == 200
    answer = json.dumps({"episode": message["episode"], "returned": 0.5})
    os.write(1, f"\\n{answer}\\n".encode())


open(sys.argv[1], "a").write("started\\n")
for line in sys.stdin:
    threading.Thread(target=play, args=(line,), daemon=True).start()
"""

MISBEHAVING = """
import asyncio
import httpx

KINDS = {kinds!r}
HAS_SUCCEEDED = asyncio.Event()


async def solve(task, endpoint):
    kind = KINDS[task.episode_id[1] % len(KINDS)]
    headers = {{"authorization": f"Bearer {{endpoint.api_key}}"}}
    url = endpoint.base_url + "/chat/completions"
    body = {{"messages": list(task.messages), "max_tokens": 4}}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        async def ask(more={{}}, **options):
            options = {{"headers": headers, **options}}
            return await client.post(url, json={{**body, **more}}, **options)

        if kind in ("fine", "asks twice", "rewrites history"):
            first = (await ask()).json()["choices"]
            HAS_SUCCEEDED.set()
        else:  # a run whose first agents all fail ends
            await HAS_SUCCEEDED.wait()
        if kind == "asks twice":
            again = await ask(headers={{**headers, "x-stainless-retry-count": "1"}})
            assert again.json()["choices"] == first
        if kind == "rewrites history":
            told = [{{"role": "assistant", "content": "x"}}, {{"role": "user", "content": "y"}}]
            await ask({{"messages": [*body["messages"], *told]}})
        if kind == "hangs up":
            try:
                await ask({{"max_tokens": 40}}, timeout=0.001)
            except httpx.TimeoutException:
                pass
        refused = {{"n=2": {{"n": 2}}, "JSON": {{"response_format": {{"type": "json_object"}}}}}}
        if kind in refused:
            assert (await ask(refused[kind])).status_code == 400
        if kind == "no key":
            assert (await ask(headers={{}})).status_code == 401
    return 0.5
"""
GOOD = ("fine", "asks twice", "rewrites history")
BAD = ("never asks", "hangs up", "n=2", "JSON", "no key")


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


def test_a_command_that_plays_all_episodes_of_a_run_is_started_once(
    materials: Materials,
    tmp_path: Path,
) -> None:
    (tmp_path / "shared.py").write_text(SHARED)
    note = tmp_path / "note"
    argv = [sys.executable, str(tmp_path / "shared.py"), str(note)]
    entry = {"kind": "command", "argv": argv, "processes": 1, "reward": "agent"}
    keys = agents_file(tmp_path, entry)
    before = set(psutil.Process().children(recursive=True))
    train_on(configured(materials, tmp_path / "run", *keys))
    rows = metrics_of(tmp_path / "run")
    assert [rows[step]["agent/failed"] for step in (1, 2)] == [0, 0]
    assert {rows[step]["critic/score/mean"] for step in (1, 2)} == {0.5}
    assert note.read_text() == "started\n"
    assert set(psutil.Process().children(recursive=True)) <= before


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


def test_agents_that_misbehave_have_no_score_or_are_recorded_once(
    materials: Materials,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One sample of each kind for each of four prompts; a failure is never a reward of 0."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "misbehaving.py").write_text(MISBEHAVING.format(kinds=(*GOOD, *BAD)))
    run = tmp_path / "run"
    keys = [
        *agents_file(tmp_path, {"_target_": "misbehaving.solve", "reward": "agent"}),
        f"{ROLLOUT}.n={len(GOOD) + len(BAD)}",
        f"trainer.rollout_data_dir={run / 'dumps'}",
        "trainer.total_training_steps=1",
        "data.max_prompt_length=96",
        "data.val_files=[]",
    ]
    train_on(configured(materials, run, *keys))
    row = metrics_of(run)[1]
    assert row["agent/failed"] == row["reward/errors"] == 4 * len(BAD)
    assert row["agent/forks/edited"] == 4
    scores = [line["score"] for line in read_lines(run / "dumps/1.jsonl")]
    assert Counter(scores) == {None: 4 * len(BAD), 0.5: 4 * len(GOOD)}
    assert not [one for one in caplog.records if one.name == "asyncio"], caplog.text


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
