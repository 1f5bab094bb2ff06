# SPDX-License-Identifier: Apache-2.0
"""The game of ``openenv_server.py`` as a server of the package openenv-core.

``python openenv_game.py PLACES PORT`` serves at most PLACES sessions at once.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A number."""

    guess: int


class Said(Observation):
    """The answer to a guess."""

    text: str = ""


class Game(Environment):
    """A secret number, the seed modulo 10."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._secret = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **fields: Any) -> Said:
        self._secret = (seed or 0) % 10
        return Said(text=f"Guess a number below {fields.get('below', 10)}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        if action.guess == 13:
            raise RuntimeError("unlucky")
        is_right = action.guess == self._secret
        text = "right" if is_right else "wrong"
        return Said(text=text, done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Said, max_concurrent_envs=int(sys.argv[1]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
