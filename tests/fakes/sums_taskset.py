# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers with eight sums, and a ninth task whose reward raises."""

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
        for number in range(1, 10):
            answer = str(2 * number) if number < 9 else ""
            prompt = f"What is {number} + {number}?"
            yield SumTask(Sum(prompt=prompt, answer=answer), self.config.task)
