# SPDX-License-Identifier: Apache-2.0
"""Environments behind OpenEnv's wire protocol: sessions, capacity, failures (M27).

The server is a real process (``tests/fakes/openenv_server.py``).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.agents.agent_files import read_agent_file
from tandem.agents.openenv import OpenEnvSession
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import AGENTS_KEY, SECTION, EnvironmentSetup, OpenEnvSpec, ToolLimits
from tandem.data.call_formats import CALL_FORMATS
from tandem.data.span_tree import rows_of
from tandem.driver import agents
from tandem.errors import UserError
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.conversing import Conversing, HostedEnvironment, TurnLimits
from tandem.pipeline.episodes import EpisodePlayer, outcome_of_end
from tandem.types import (
    Completion,
    EpisodeEnd,
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardStatus,
    SamplingParams,
    ToolStatus,
    Trajectory,
)
from tests.fakes.configured import config
from tests.fakes.made_tokenizers import codec_for

SERVER = str(Path(__file__).parents[1] / "fakes" / "openenv_server.py")
CODEC = codec_for("qwen2_5")
USER = {"role": "user", "content": "Play."}
UID = 17
"""The seed of the game, whose secret number is 7."""


@contextmanager
def serving(places: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    argv = [sys.executable, SERVER, str(places)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{server.stdout.readline().strip()}", server
        finally:
            server.kill()


class Policy:
    """A policy that draws the same given texts for each sample."""

    version = 3

    def __init__(self, turns: Sequence[str]) -> None:
        self._turns = turns
        self._num_drawn: dict[int, int] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}

    def submit_apart(self, request: GenerationRequest) -> list[asyncio.Future[Any]]:
        (sample,) = request.sample_ids
        self.prompts.setdefault(sample, tuple(request.prompt_ids))
        number = self._num_drawn.get(sample, 0)
        self._num_drawn[sample] = number + 1
        ids = array("i", CODEC.encode([self._turns[number] + "<|im_end|>"])[0])
        log_probs = array("f", [-0.5] * len(ids))
        done = asyncio.get_running_loop().create_future()
        completion = Completion(sample, ids, log_probs, FinishReason.STOP, self.version)
        done.set_result((completion,))
        return [done]

    async def forget(self, sample_ids: Sequence[int]) -> None:
        pass


def guess(number: Any) -> str:
    described = json.dumps({"name": "step", "arguments": {"guess": number}})
    return f"<tool_call>\n{described}\n</tool_call>"


def play(
    spec: OpenEnvSpec,
    *turns: str,
    num_samples: int = 1,
    num_processes: int = 1,
    limits: ToolLimits | None = None,
) -> tuple[list[Trajectory], Policy]:
    """Play the samples of one prompt."""

    async def main() -> tuple[list[Trajectory], Policy]:
        policy = Policy(turns)
        engine: Any = policy
        pool = EnvironmentPool(
            EnvironmentSetup(openenvs=(spec,), limits=limits or ToolLimits()),
            num_processes=num_processes,
            environment=dict(os.environ),
        )
        async with asyncio.timeout(120), pool:
            await pool.start()
            conversing = Conversing(
                CODEC,
                pool,
                CALL_FORMATS["hermes"],
                {},
                TurnLimits(6, None, 60.0),
                max_prompt_tokens=500,
                hosted={
                    "game": HostedEnvironment(
                        pool.actions["game"], spec.gives_reward, spec.max_running
                    )
                },
            )
            ids = tuple(CODEC.encode(CODEC.render([[USER]]))[0])
            prompt = Prompt(UID, 0, ids, "", "s", None, messages=[USER], agent="game")
            samples = tuple(range(num_samples))
            request = GenerationRequest(samples, ids, SamplingParams(1.0, 1.0, -1, 800))
            player = EpisodePlayer(engine, conversing, trace=TraceRecorder(lambda: 0.0, sink=None))
            (answers,) = player.start([prompt], [request])
            return list(await answers), policy

    return asyncio.run(main())


def ends(trajectory: Trajectory) -> tuple[EpisodeEnd, tuple[float, ...]]:
    assert trajectory.episode is not None
    return trajectory.episode.end, trajectory.episode.rewards


def contents(trajectory: Trajectory) -> list[str]:
    assert trajectory.episode is not None
    messages: Sequence[Mapping[str, Any]] = trajectory.episode.messages
    return [str(one["content"]) for one in messages if one["role"] != "assistant"]


def test_m27_samples_over_the_capacity_of_a_server_wait_and_finish() -> None:
    with serving(2) as (url, _):
        spec = OpenEnvSpec("game", url, observation_field="text", reset={"below": 10})
        played, policy = play(
            spec, guess(3), guess("seven"), guess(7), num_samples=8, num_processes=2
        )
        with urllib.request.urlopen(f"{url}/most") as answer:
            assert json.load(answer) == {"most": 2}
    assert [ends(one) for one in played] == [(EpisodeEnd.DONE, (0.0, 1.0))] * 8
    for one in played:
        outcome = outcome_of_end(one)
        assert outcome is not None and (outcome.status, outcome.score) == (RewardStatus.VALUE, 1.0)
        assert contents(one) == [
            "Guess a number below 10.",
            "wrong",
            "The action is wrong: guess: Input should be a valid integer.",
        ]
        assert one.episode is not None
        statuses = [ToolStatus.OK, ToolStatus.MODEL_ERROR, ToolStatus.OK]
        assert list(one.episode.statuses) == statuses
        (row,) = rows_of(one)
        assert tuple(row.prompt_ids) == policy.prompts[0]
    text = CODEC.decode([policy.prompts[0]], skip_special=False)[0]
    assert "Play." in text and "Guess a number below 10." in text and '"guess"' in text


def test_the_text_of_a_turn_may_be_the_action() -> None:
    with serving(1) as (url, _):
        spec = OpenEnvSpec("game", url, action_field="guess", gives_reward=False)
        (one,), _ = play(spec, "3", "7")
    assert ends(one) == (EpisodeEnd.DONE, (0.0, 1.0)) and outcome_of_end(one) is None
    assert contents(one) == ['{"text": "Guess a number below 10."}', '{"text": "wrong"}']


@pytest.mark.parametrize(
    ("turns", "fields", "detail"),
    [
        ((guess(13),), {}, "answered step with EXECUTION_ERROR: unlucky"),
        ((guess(3),), {"reset": {"over": True}}, "ended the episode before the first action"),
        ((guess(3),), {"observation_field": "board"}, "no field 'board'; it has text, done"),
        ((guess(3),), {"reset": {"below": "x" * 3000}}, "tokens, more than 500 (data.max"),
    ],
)
def test_a_failure_of_the_environment_is_no_reward(
    turns: Sequence[str], fields: dict[str, Any], detail: str
) -> None:
    with serving(1) as (url, _):
        (one,), _ = play(OpenEnvSpec("game", url, **fields), *turns)
    assert one.episode is not None and one.episode.end is EpisodeEnd.FAILED
    outcome = outcome_of_end(one)
    assert outcome is not None and outcome.status is RewardStatus.ERROR
    assert detail in outcome.detail


def test_observations_are_cut_only_if_it_is_asked_for() -> None:
    with serving(1) as (url, _):
        spec = OpenEnvSpec("game", url, action_field="guess", observation_field="text")
        spec = replace(spec, reset={"below": "x" * 280})
        (whole,), _ = play(spec, "7")
        (cut,), _ = play(spec, "7", limits=ToolLimits(10, 5, 9, "left"))
    assert contents(whole) == [f"Guess a number below {'x' * 280}."]
    assert contents(cut) == ["(truncated)...xxxxxxxx."]


def test_the_length_of_observations_is_that_of_calls_if_the_key_is_set(tmp_path: Path) -> None:
    (tmp_path / "agents.yaml").write_text("- {name: game, kind: openenv, url: 'http://x'}")
    path = f"{AGENTS_KEY}={tmp_path / 'agents.yaml'}"
    for length, keys in ((None, []), (256, [f"{SECTION}.max_tool_response_length=256"])):
        setup, _ = agents._setup(config(path, *keys).actor_rollout_ref.rollout)
        assert setup.limits.max_observation_characters == length


def test_an_episode_without_an_action_has_the_reward_0() -> None:
    with serving(1) as (url, _):
        (one,), _ = play(OpenEnvSpec("game", url), "I give up.")
    outcome = outcome_of_end(one)
    assert ends(one) == (EpisodeEnd.ANSWER, ()) and outcome is not None and outcome.score == 0.0


def test_a_server_that_dies_fails_its_session_and_others_are_named_before_training() -> None:
    async def ask(url: str, server: subprocess.Popen[str]) -> None:
        session = OpenEnvSession(OpenEnvSpec("game", url))
        answer = await session.reset({"seed": 5})
        assert answer["observation"]["done"] is False
        server.kill()
        server.wait()
        with pytest.raises(Exception, match="ended") as caught:
            await session.step({"guess": 1})
        assert type(caught.value).__name__ == "ServerFailed"
        with pytest.raises(Exception, match="cannot be reached: Connection refused"):
            await OpenEnvSession(OpenEnvSpec("game", url)).reset({})

    with serving(1) as (url, server):
        with pytest.raises(Exception, match=r"is no WebSocket \(HTTP status 404\)"):
            asyncio.run(OpenEnvSession(OpenEnvSpec("game", f"{url}/x")).reset({}))
        asyncio.run(ask(url, server))
    with pytest.raises(UserError, match=f"'game': the server {url} cannot be used: .*refused"):
        play(OpenEnvSpec("game", url))


BAD_ENTRIES = {
    "url: x": "the url 'x' does not begin with http",
    "": "the url '' does not begin with http",
    "url: http://x, action: y": "has an unknown field 'action'",
    "url: http://x, timeout: 0": "timeout=0 is not a number of seconds above 0",
    "url: http://x, reset: 3": "reset is not a mapping",
    "url: http://x, tool: [a]": "tool is not a name",
}


@pytest.mark.parametrize("entry", BAD_ENTRIES)
def test_entries_with_mistakes(tmp_path: Path, entry: str) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text(f"- {{name: a, kind: openenv, {entry}}}")
    with pytest.raises(UserError, match=f"entry 0: {BAD_ENTRIES[entry]}"):
        read_agent_file(str(file))


def test_an_entry_is_read(tmp_path: Path) -> None:
    file = tmp_path / "agents.yaml"
    file.write_text(
        "- {name: game, kind: openenv, url: 'http://x:8000/', reset: {a: 1}, timeout: 5}"
    )
    expected = OpenEnvSpec("game", "http://x:8000", reset={"a": 1}, timeout_s=5.0)
    assert read_agent_file(str(file)).openenvs == (expected,)
