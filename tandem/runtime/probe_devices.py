# SPDX-License-Identifier: Apache-2.0
"""The number of this node's devices of each platform of a run.

Several platforms are probed in short-lived processes, because a vendor's extension changes the
process that loads it.
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
from tandem.runtime.cluster import NodeDevices
from tandem.runtime.resources import marker_of

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

_PROGRAM = (
    "import json, pickle, sys; platform = pickle.load(sys.stdin.buffer); "
    "problem = platform.probe(); "
    "print('\\ntandem', json.dumps([0 if problem else platform.num_devices(), problem]))"
)
_PREFIX = "tandem "
"""The start of the line with the answer. Vendors' packages print, too."""
_TIMEOUT_S = 60.0
"""Loading a vendor's extension from a cold disk takes ten seconds."""


def find_devices(platforms: Collection[Platform]) -> list[NodeDevices]:
    """Return the devices of each platform on this node.

    If there are several, each has a marker, and the host's platform is left out.

    Raises:
        UserError: a vendor's driver does not answer.
    """
    distinct = list({platform.name: platform for platform in platforms}.values())
    if len(distinct) == 1:
        return [NodeDevices(distinct[0].visibility, distinct[0].num_devices())]
    accelerators = [platform for platform in distinct if marker_of(platform)]
    answers = _probe([platform for platform in accelerators if not _is_missing(platform)])
    found: list[NodeDevices] = []
    for platform in accelerators:
        number, problem = answers.get(platform.name) or (0, platform.probe())
        marker = marker_of(platform)
        found.append(NodeDevices(platform.visibility, number, marker, problem=problem))
    return found


def _is_missing(platform: Platform) -> bool:
    """Return whether the extension is missing, in which case ``probe`` loads nothing."""
    return bool(platform.extension) and find_spec(platform.extension) is None


def _probe(platforms: Collection[Platform]) -> Mapping[str, tuple[int, str]]:
    """Return the number of devices, and why there are none, by the platform's name."""
    probes = {
        platform.name: subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
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
            output, _ = probes[name].communicate(pickle.dumps(platform), timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            for process in probes.values():
                process.kill()
            raise UserError(
                f"platform {name}",
                rule=f"its driver did not list this node's devices within {_TIMEOUT_S:.0f} s",
                remedy="Check the devices with the vendor's tool, or remove the platform from "
                "pools.*.",
            ) from error
        lines = [line for line in output.decode().splitlines() if line.startswith(_PREFIX)]
        problem = "the process that looked for its devices ended without an answer"
        answers[name] = tuple(json.loads(lines[-1][len(_PREFIX) :])) if lines else (0, problem)
    return answers
