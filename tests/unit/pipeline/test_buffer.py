# SPDX-License-Identifier: Apache-2.0
"""The buffer between producer and trainer."""

import asyncio

from tandem.pipeline.buffer import GroupBuffer, ScoredGroup
from tandem.types import Group, Prompt


def group(uid: int) -> ScoredGroup:
    return ScoredGroup(Group(Prompt(uid, uid, (1,), "", "source", ""), ()))


def test_groups_leave_in_the_order_of_their_draw() -> None:
    async def take() -> list[int]:
        buffer = GroupBuffer()
        for uid in (2, 0, 1):
            await buffer.put(group(uid))
        first = await buffer.take(2)
        return [scored.group.prompt.uid for scored in first]

    assert asyncio.run(take()) == [0, 1]


def test_close_lets_take_return_what_there_is() -> None:
    async def take() -> list[int]:
        buffer = GroupBuffer()
        await buffer.put(group(5))
        waiting = asyncio.create_task(buffer.take(3))
        await asyncio.sleep(0)
        await buffer.close()
        return [scored.group.prompt.uid for scored in await waiting]

    assert asyncio.run(take()) == [5]
