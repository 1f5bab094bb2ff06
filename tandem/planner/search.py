# SPDX-License-Identifier: Apache-2.0
"""The search for the division of devices and the lag with the shortest training step.

The search starts from the split that balances the times of the groups, and moves devices between
groups as long as the predicted step gets shorter. It then takes the smallest lag that is nearly as
fast as the fastest. The prediction comes in as a function, such as that of ``prediction``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from tandem.planner.task_times import SYNC, TaskTimes

NEARLY = 1.02
"""The factor up to which a longer step counts as nearly as fast as the fastest."""
_SYNCED_TASKS = ("actor-train", "generate")

Groups = Sequence[Sequence[str]]
"""Tasks that share devices, group by group."""


@dataclass(frozen=True, slots=True)
class Split:
    """The number of devices of each group, and the batches that are generated ahead."""

    devices: tuple[int, ...]
    lag: float


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The best split found.

    Attributes:
        seconds: the predicted step of the split.
        predictions: the predicted steps of all splits that were tried.
    """

    split: Split
    seconds: float
    predictions: Mapping[Split, float]


class Predictions:
    """The predicted steps of splits, each predicted once."""

    def __init__(self, predict: Callable[[Split], float]) -> None:
        self._predict = predict
        self.known: dict[Split, float] = {}

    def seconds(self, split: Split) -> float:
        """Return the seconds of a step with ``split``."""
        if split not in self.known:
            self.known[split] = self._predict(split)
        return self.known[split]

    def best(self, splits: Sequence[Split]) -> Split:
        """Return the fastest of ``splits``, the first of equal ones."""
        return min(splits, key=self.seconds)


def lower_bound_s(times: TaskTimes, groups: Groups, *, devices: Sequence[int]) -> float:
    """Return the seconds of work of the busiest group in a step, including weight transfers."""
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
    """Return the division with the lowest ``lower_bound_s``, or the nearest that is allowed.

    Devices go one by one to the slowest group. Return None if no division is allowed.
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
    lags: Sequence[float],
    is_allowed: Callable[[tuple[int, ...]], bool],
    predict: Callable[[Split], float],
) -> Suggestion:
    """Return the fastest split found from ``start`` on, with the same number of devices.

    Args:
        lags: the lags to try, ascending.
        is_allowed: returns whether a run accepts a division of the devices.
        predict: returns the seconds of a step.
    """
    predictions = Predictions(predict)
    predictions.seconds(start)  # it is listed among the splits that were tried
    num_devices = sum(start.devices)
    balanced = balanced_split(times, groups, num_devices=num_devices, is_allowed=is_allowed)
    candidates = {start.devices, balanced or start.devices}
    largest = max(lags)
    found = predictions.best([Split(devices, largest) for devices in sorted(candidates)])
    found = _descend(found, predictions, is_allowed=is_allowed)
    found = _smallest_lag(found.devices, lags, predictions=predictions)
    found = _descend(found, predictions, is_allowed=is_allowed)
    return Suggestion(found, predictions.seconds(found), predictions.known)


def _descend(
    split: Split, predictions: Predictions, *, is_allowed: Callable[[tuple[int, ...]], bool]
) -> Split:
    """Move devices between two groups while a step gets shorter, first many at a time, then few."""
    stride = max(sum(split.devices) // 4, 1)
    while True:
        neighbours = [
            Split(devices, split.lag)
            for devices in _neighbours(split.devices, stride)
            if is_allowed(devices)
        ]
        best = predictions.best([split, *neighbours])
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


def _smallest_lag(
    devices: tuple[int, ...], lags: Sequence[float], *, predictions: Predictions
) -> Split:
    splits = [Split(devices, lag) for lag in lags]
    limit = NEARLY * min(predictions.seconds(split) for split in splits)
    return next(split for split in splits if predictions.seconds(split) <= limit)


def _nearest_allowed(
    devices: tuple[int, ...], is_allowed: Callable[[tuple[int, ...]], bool]
) -> tuple[int, ...] | None:
    """Return the first allowed division, moving more and more devices between two groups."""
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
