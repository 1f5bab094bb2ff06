# SPDX-License-Identifier: Apache-2.0
"""An environment that the package openenv-core serves (M27).

It is no dependency of tandem: ``make test-verifiers`` installs it into an environment of its own
and names its interpreter in TANDEM_OPENENV_PYTHON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.agents.setup import OpenEnvSpec
from tandem.pipeline.episodes import outcome_of_end
from tandem.types import EpisodeEnd, RewardStatus, ToolStatus
from tests.children.test_openenv import contents, ends, guess, play

PYTHON = os.environ.get("TANDEM_OPENENV_PYTHON", "")
GAME = Path(__file__).parents[1] / "fakes" / "openenv_game.py"
LIMIT_S = 120
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs openenv-core: make test-verifiers")


@contextmanager
def serving(places: int) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([PYTHON, str(GAME), str(places), str(port)]) as server:
        try:
            ends_s = time.monotonic() + LIMIT_S
            while not _is_up(url):
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < ends_s, "the server has not started"
                time.sleep(0.2)
            yield url
        finally:
            server.kill()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=LIMIT_S):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False


def test_m27_the_package_serves_more_samples_than_it_has_places() -> None:
    with serving(2) as url:
        spec = OpenEnvSpec("game", url, observation_field="text", reset={"below": 10})
        turns = (guess(3), guess("seven"), guess(7))
        played, policy = play(spec, *turns, num_samples=8, num_processes=2)
    assert [ends(one) for one in played] == [(EpisodeEnd.DONE, (0.0, 1.0))] * 8
    for one in played:
        assert one.episode is not None
        statuses = [ToolStatus.OK, ToolStatus.MODEL_ERROR, ToolStatus.OK]
        assert list(one.episode.statuses) == statuses
        said = contents(one)
        assert said[:2] == ["Guess a number below 10.", "wrong"]
        assert said[2].startswith("The action is wrong: ") and "guess" in said[2]
    assert len(set(policy.prompts.values())) == 1


def test_m27_an_environment_that_raises_gives_no_reward() -> None:
    with serving(1) as url:
        (raised,), _ = play(OpenEnvSpec("game", url), guess(13))
    outcome = outcome_of_end(raised)
    assert outcome is not None and outcome.status is RewardStatus.ERROR
    assert "unlucky" in outcome.detail
