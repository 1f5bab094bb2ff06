# SPDX-License-Identifier: Apache-2.0
"""How many devices of a run's platforms this node has.

Where there are several platforms, in processes that end: a vendor's extension changes the process
that loads it, and the one that drives a run may have to ask for two.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tandem.errors import UserError
from tandem.runtime.cluster import OwnDevices
from tandem.runtime.demand import marker_of

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

_ASK = (
    "import pickle, sys; platform = pickle.load(sys.stdin.buffer); "
    "print(0 if platform.probe() else platform.num_devices())"
)


_LIMIT_S = 60.0
"""For an answer. Loading a vendor's extension from a cold disk takes ten seconds."""


def own_devices(platforms: Collection[Platform]) -> list[OwnDevices]:
    """What this node has of them, marked where they are several.

    Raises:
        UserError: a vendor's driver does not answer.
    """
    distinct = list({platform.name: platform for platform in platforms}.values())
    if len(distinct) == 1:
        return [OwnDevices(distinct[0].visibility, distinct[0].num_devices())]
    accelerators = [platform for platform in distinct if marker_of(platform)]
    counts = _count(accelerators)
    return [
        OwnDevices(platform.visibility, counts[platform.name], marker_of(platform))
        for platform in accelerators
        if counts[platform.name]
    ]


def _count(platforms: Collection[Platform]) -> Mapping[str, int]:
    """Devices by name of the platform; 0 where it cannot be used."""
    asked = {
        platform.name: subprocess.Popen(
            [sys.executable, "-c", _ASK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for platform in platforms
    }
    counts: dict[str, int] = {}
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
        answer = told.split()
        counts[name] = int(answer[-1]) if answer else 0
    return counts
