# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers with three sums; the reward of the third one raises."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Sums"]


class Sum(vf.TaskData):
    """The numbers of a sum are equal."""

    answer: str


class SumTask(vf.Task[Sum]):
    """A task that is right if the reply holds the answer."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if not self.data.answer:
            raise RuntimeError("the judge is broken")
        return float(self.data.answer in (trace.last_reply or ""))


class Sums(vf.Taskset[SumTask]):
    """The tasks."""

    def load(self):
        for number, answer in ((1, "2"), (2, "4"), (3, "")):
            prompt = f"What is {number} + {number}?"
            yield SumTask(Sum(prompt=prompt, answer=answer), self.config.task)
