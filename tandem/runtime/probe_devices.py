# SPDX-License-Identifier: Apache-2.0
"""How many devices of a run's platforms this node has.

Where there are several platforms, in processes that end: a vendor's extension changes the process
that loads it, and the one that drives a run may have to ask for two.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tandem.errors import UserError
from tandem.runtime.cluster import OwnDevices
from tandem.runtime.resources import marker_of

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

_ASK = (
    "import json, pickle, sys; platform = pickle.load(sys.stdin.buffer); "
    "problem = platform.probe(); "
    "print('\\ntandem', json.dumps([0 if problem else platform.num_devices(), problem]))"
)
_MARK = "tandem "
"""Of the line that answers: vendors' packages print, too."""


_LIMIT_S = 60.0
"""For an answer. Loading a vendor's extension from a cold disk takes ten seconds."""


def own_devices(platforms: Collection[Platform]) -> list[OwnDevices]:
    """What this node has of them, marked where they are several; of the host's nothing is said
    then.

    Raises:
        UserError: a vendor's driver does not answer.
    """
    distinct = list({platform.name: platform for platform in platforms}.values())
    if len(distinct) == 1:
        return [OwnDevices(distinct[0].visibility, distinct[0].num_devices())]
    accelerators = [platform for platform in distinct if marker_of(platform)]
    answers = _ask([platform for platform in accelerators if not _is_missing(platform)])
    found: list[OwnDevices] = []
    for platform in accelerators:
        number, problem = answers.get(platform.name) or (0, platform.probe())
        marker = marker_of(platform)
        found.append(OwnDevices(platform.visibility, number, marker, problem=problem))
    return found


def _is_missing(platform: Platform) -> bool:
    """Whether its extension is not installed: then its probe says so at once, and loads nothing."""
    return bool(platform.extension) and find_spec(platform.extension) is None


def _ask(platforms: Collection[Platform]) -> Mapping[str, tuple[int, str]]:
    """By name of the platform how many devices there are, and why none."""
    asked = {
        platform.name: subprocess.Popen(
            [sys.executable, "-c", _ASK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for platform in platforms
    }
    answers: dict[str, tuple[int, str]] = {}
    for platform in platforms:
        name = platform.name
        try:
            told, _ = asked[name].communicate(pickle.dumps(platform), timeout=_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            for process in asked.values():
                process.kill()
            raise UserError(
                f"platform {name}: its driver does not say within {_LIMIT_S:.0f} s what devices "
                "this node has. Look at them with the vendor's tool, or leave them out of pools.*."
            ) from error
        lines = [line for line in told.decode().splitlines() if line.startswith(_MARK)]
        problem = "the process that looked for its devices ended without an answer"
        answers[name] = tuple(json.loads(lines[-1][len(_MARK) :])) if lines else (0, problem)
    return answers
