# SPDX-License-Identifier: Apache-2.0
"""Kills of processes that start."""

from __future__ import annotations

import asyncio

import psutil


async def kill_next_children(number: int, *, before: set[psutil.Process]) -> None:
    """Kill the next children of this process, one after another, as soon as they exist.

    Args:
        before: the children that there were.
    """
    known = set(before)
    for _ in range(number):
        while not (new := {*psutil.Process().children()} - known):
            await asyncio.sleep(0.001)
        (started,) = new
        known.add(started)
        started.kill()
