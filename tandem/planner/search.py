# SPDX-License-Identifier: Apache-2.0
"""How to divide devices among groups of tasks, and how far generation may run ahead, so that a
training step takes least.

The search asks for the seconds of a step of one split after another: it starts from the split that
balances the groups' own times, which is a lower bound, and moves devices between groups as long as
that helps. The smallest lag is taken that is nearly as fast as the fastest. What predicts the
seconds comes in as a function; ``simulation`` has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from tandem.planner.task_times import SYNC, TaskTimes

NEARLY = 1.02
"""Times the fastest."""
_SYNCED_TASKS = ("actor-train", "generate")

Groups = Sequence[Sequence[str]]
"""Tasks that share devices, group by group."""


@dataclass(frozen=True, slots=True)
class Split:
    """Devices of each group, and the largest lag."""

    devices: tuple[int, ...]
    lag: int


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best split found, with the seconds of a step before and after.

    ``predictions`` are all splits that were looked at.
    """

    split: Split
    seconds: float
    start_seconds: float
    predictions: Mapping[Split, float]


class Forecasts:
    """Seconds of a step by split, each asked for once."""

    def __init__(self, predict: Callable[[Split], float]) -> None:
        self._predict = predict
        self.known: dict[Split, float] = {}

    def seconds(self, split: Split) -> float:
        """Of a step with ``split``."""
        if split not in self.known:
            self.known[split] = self._predict(split)
        return self.known[split]

    def best(self, splits: Sequence[Split]) -> Split:
        """The fastest; the first of several."""
        return min(splits, key=self.seconds)


def floor_seconds(times: TaskTimes, groups: Groups, *, devices: Sequence[int]) -> float:
    """No step is shorter than what the busiest group has to do in it, its weights sent or taken."""
    return max(
        _group_seconds(times, group, num_devices=count)
        for group, count in zip(groups, devices, strict=True)
    )


def balanced_split(
    times: TaskTimes,
    groups: Groups,
    *,
    num_devices: int,
    is_allowed: Callable[[tuple[int, ...]], bool],
) -> tuple[int, ...] | None:
    """Devices of each group with the lowest ``floor_seconds``, given one by one to the slowest.

    None if no division is allowed. Where the balanced one is not, the nearest allowed is taken.
    """
    counts = [1] * len(groups)
    for _ in range(num_devices - len(groups)):
        slowest = max(
            range(len(groups)),
            key=lambda i: _group_seconds(times, groups[i], num_devices=counts[i]),
        )
        counts[slowest] += 1
    return _nearest_allowed(tuple(counts), is_allowed)


def suggest(
    times: TaskTimes,
    groups: Groups,
    *,
    start: Split,
    lags: Sequence[int],
    is_allowed: Callable[[tuple[int, ...]], bool],
    predict: Callable[[Split], float],
) -> Suggestion:
    """The fastest split found from ``start``, whose number of devices it keeps.

    Args:
        lags: that may be suggested, ascending.
        is_allowed: whether a division of the devices can be run.
    """
    forecasts = Forecasts(predict)
    start_seconds = forecasts.seconds(start)
    num_devices = sum(start.devices)
    even = balanced_split(times, groups, num_devices=num_devices, is_allowed=is_allowed)
    candidates = {start.devices, even or start.devices}
    largest = max(lags)
    found = forecasts.best([Split(devices, largest) for devices in sorted(candidates)])
    found = _descend(found, forecasts, is_allowed=is_allowed)
    found = _smallest_lag(found.devices, lags, forecasts=forecasts)
    found = _descend(found, forecasts, is_allowed=is_allowed)
    return Suggestion(found, forecasts.seconds(found), start_seconds, forecasts.known)


def _descend(
    split: Split, forecasts: Forecasts, *, is_allowed: Callable[[tuple[int, ...]], bool]
) -> Split:
    """Move devices between two groups while a step gets shorter: many at first, then few."""
    stride = max(sum(split.devices) // 4, 1)
    while True:
        neighbours = [
            Split(devices, split.lag)
            for devices in _neighbours(split.devices, stride)
            if is_allowed(devices)
        ]
        best = forecasts.best([split, *neighbours])
        if best != split:
            split = best
        elif stride == 1:
            return split
        else:
            stride //= 2


def _neighbours(devices: tuple[int, ...], stride: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for giver, taker in permutations(range(len(devices)), 2):
        if devices[giver] > stride:
            moved = list(devices)
            moved[giver] -= stride
            moved[taker] += stride
            found.append(tuple(moved))
    return found


def _smallest_lag(devices: tuple[int, ...], lags: Sequence[int], *, forecasts: Forecasts) -> Split:
    splits = [Split(devices, lag) for lag in lags]
    limit = NEARLY * min(forecasts.seconds(split) for split in splits)
    return next(split for split in splits if forecasts.seconds(split) <= limit)


def _nearest_allowed(
    devices: tuple[int, ...], is_allowed: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """By moving ever more devices between two groups."""
    if is_allowed(devices):
        return devices
    for stride in range(1, sum(devices)):
        for moved in _neighbours(devices, stride):
            if is_allowed(moved):
                return moved
    return None


def _group_seconds(times: TaskTimes, group: Sequence[str], *, num_devices: int) -> float:
    work = sum(times.seconds(task, num_devices) for task in group)
    is_synced = any(task in _SYNCED_TASKS for task in group)
    return work + (times.seconds(SYNC, num_devices) if is_synced else 0.0)
