# SPDX-License-Identifier: Apache-2.0
"""Advice on how to divide the devices of a run among its tasks.

The advice is based on measured times of earlier runs (``planner.task_times``) and on a simulation
of the pipeline (``planner.prediction``). It starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.check.async_rules import time_sharing_errors
from tandem.config.check.device_rules import run_device_errors
from tandem.config.derived.pools import needed_tasks, place_run
from tandem.config.parse.shares import show_groups
from tandem.config.schema.pools import HALVES
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.metrics.number_format import format_number
from tandem.planner.prediction import predict_step, predictor
from tandem.planner.search import (
    NEARLY,
    Split,
    Suggestion,
    balanced_split,
    lower_bound_s,
    suggest,
)
from tandem.planner.task_times import TIMES_OPTION, MeasuredRun, TaskTimes, measured_run

_LAGS = (0, 1, 2, 3, 4, 6, 8)
_REFERENCE = "ref_logp"
Groups = tuple[tuple[str, ...], ...]
"""Tasks that share devices, group by group."""


@dataclass(frozen=True, slots=True)
class SplitAdvice:
    """The suggested split for a configuration.

    Attributes:
        groups: the groups of the suggested split.
        configured_seconds: the predicted seconds of a step as configured.
        lower_bound_s: the lower bound of a step with the suggested split.
        num_simulated: the number of splits that were simulated.
        overrides: the arguments that configure the suggested split.
    """

    groups: Groups
    suggestion: Suggestion
    configured_seconds: float
    lower_bound_s: float
    num_simulated: int
    overrides: tuple[str, ...]

    @property
    def is_better(self) -> bool:
        """Whether the suggested split is faster than the configured one."""
        return self.suggestion.seconds < self.configured_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON."""
        split = self.suggestion.split
        return {
            "devices": {
                "+".join(group): count
                for group, count in zip(self.groups, split.devices, strict=True)
            },
            "lag": split.lag,
            "is_better": self.is_better,
            "step_s": self.suggestion.seconds,
            "floor_s": self.lower_bound_s,
            "step_s_as_configured": self.configured_seconds,
            "splits_simulated": self.num_simulated,
            "overrides": list(self.overrides),
        }


def advise(config: RunConfig, times: TaskTimes) -> SplitAdvice:
    """Return the fastest split of the run's devices among its groups (two halves if unnamed).

    Other groups are suggested only if they are clearly faster: the reference in another group, or
    all tasks in one. Decode steps are longest in one group, so it is considered only if their pace
    is known.

    Raises:
        UserError: a task of the run was not measured, or there are too few devices to divide.
    """
    times, needed = times.planned(config), needed_tasks(config)
    for task in needed:
        if not times.measured.get(task):
            raise UserError(
                TIMES_OPTION,
                rule=f"holds no times of {task}, which this run performs",
                remedy=f"Add a run that performs {task}, or a table with its times.",
            )
    named = config.trainer.separated_node_tasks or HALVES
    kept = (tuple(task for task in group if task in needed) for group in named)
    groups = tuple(group for group in kept if group)
    num_devices = config.trainer.num_devices
    shared = (needed,)
    tries_shared = times.decoding is not None and not any(time_sharing_errors(config))
    if num_devices < len(groups) and tries_shared:
        groups = shared
    if num_devices < len(groups):
        raise UserError(
            "trainer.n_gpus_per_node",
            config.trainer.n_gpus_per_node,
            rule=f"{num_devices} device(s) cannot be divided among {len(groups)} groups",
            remedy=f"Set trainer.n_gpus_per_node={len(groups)} or more, or name fewer groups.",
        )
    found = {groups: _suggest(config, times, groups=groups, start=_start(config, groups))}
    for others in [*_with_reference_elsewhere(groups), *([shared] if tries_shared else [])]:
        start = balanced_split(
            times, others, num_devices=num_devices, is_allowed=_rule(config, others)
        )
        if start is not None and not any(_are_same(others, known) for known in found):
            start_split = Split(start, config.trainer.batches_ahead)
            found[others] = _suggest(config, times, groups=others, start=start_split)
    fastest = min(found, key=lambda groups: found[groups].seconds)
    if found[groups].seconds <= NEARLY * found[fastest].seconds:
        fastest = groups
    return _advice(config, times, groups=fastest, found=found)


def _suggest(config: RunConfig, times: TaskTimes, *, groups: Groups, start: Split) -> Suggestion:
    return suggest(
        times,
        groups,
        start=start,
        lags=_lags(config, groups),
        is_allowed=_rule(config, groups),
        predict=predictor(config, times, groups=groups),
    )


def _lags(config: RunConfig, groups: Groups) -> list[float]:
    shares_devices = any({"generate", "actor-train"} <= {*group} for group in groups)
    if shares_devices and any(time_sharing_errors(config)):
        return [0]
    return sorted({*_LAGS, config.trainer.batches_ahead})


def _with_reference_elsewhere(groups: Groups) -> list[Groups]:
    """Return the groups with the reference moved to each other group, and to one of its own."""
    kept = tuple(tuple(task for task in group if task != _REFERENCE) for group in groups)
    if kept == groups:
        return []
    rest = tuple(group for group in kept if group)
    joined = [
        (*rest[:index], (*group, _REFERENCE), *rest[index + 1 :])
        for index, group in enumerate(rest)
    ]
    others = [*joined, (*rest, (_REFERENCE,))]
    return [one for one in others if not _are_same(one, groups)]


def _are_same(groups: Groups, others: Groups) -> bool:
    return {*map(frozenset, groups)} == {*map(frozenset, others)}


def _advice(
    config: RunConfig, times: TaskTimes, *, groups: Groups, found: Mapping[Groups, Suggestion]
) -> SplitAdvice:
    suggestion = found[groups]
    split = suggestion.split
    return SplitAdvice(
        groups=groups,
        suggestion=suggestion,
        configured_seconds=configured_seconds(config, times),
        lower_bound_s=lower_bound_s(times, groups, devices=split.devices),
        num_simulated=sum(len(one.predictions) for one in found.values()),
        overrides=(
            f"trainer.separated_node_tasks={show_groups(groups)}",
            f"trainer.separated_node_ratios={list(_ratios(split.devices))}".replace(" ", ""),
            f"trainer.async_pipeline={split.lag > 0}",
            f"trainer.generate_ahead_steps={split.lag:g}",
            "actor_rollout_ref.hybrid_engine=False",
        ),
    )


def configured_seconds(config: RunConfig, times: TaskTimes) -> float:
    """Predict the seconds of a step with the devices as ``config`` places them."""
    pools = place_run(config).used_pools
    split = Split(tuple(pool.num_devices for pool in pools), config.trainer.batches_ahead)
    return predict_step(config, times, groups=[pool.tasks for pool in pools], split=split)


def forecast_rows(folder: Path) -> list[tuple[str, str]]:
    """Return rows for the report of an asynchronous run: its predicted and its achieved step.

    The prediction uses the task times of the run itself. A synchronous run, or one with too few
    steps, has no rows.
    """
    try:
        measured = measured_run(folder)
    except UserError:
        return []
    if measured.config.trainer.max_lag == 0:
        return []
    return _forecast(measured)


def _forecast(measured: MeasuredRun) -> list[tuple[str, str]]:
    times, config = measured.times, measured.config
    pools = place_run(config).used_pools
    devices = [pool.num_devices for pool in pools]
    bound_s = lower_bound_s(times, [pool.tasks for pool in pools], devices=devices)
    predicted = configured_seconds(config, times)
    difference = measured.step_s / predicted - 1
    return [
        ("step, predicted from its task times", format_seconds(predicted)),
        (
            "step, achieved (median wall time)",
            f"{format_seconds(measured.step_s)} ({difference:+.0%})",
        ),
        ("busiest pool, the least a step can take", format_seconds(bound_s)),
        ("overlap: busiest pool / step", f"{bound_s / measured.step_s:.2f}"),
    ]


def _start(config: RunConfig, groups: Sequence[tuple[str, ...]]) -> Split:
    """Return the configured devices if ``groups`` are configured; else equal numbers."""
    num_devices, lag = config.trainer.num_devices, config.trainer.batches_ahead
    pools = place_run(config).used_pools
    counts = tuple(pool.num_devices for pool in pools)
    if tuple(pool.tasks for pool in pools) != groups or sum(counts) != num_devices:
        share, more = divmod(num_devices, len(groups))
        counts = tuple(share + (i < more) for i in range(len(groups)))
    return Split(counts, lag)


def _rule(
    config: RunConfig, groups: Sequence[tuple[str, ...]]
) -> Callable[[tuple[int, ...]], bool]:
    """Return a function that returns whether a run accepts a division of its devices."""

    def is_allowed(devices: tuple[int, ...]) -> bool:
        trainer = config.trainer.model_copy(
            update={
                "separated_node_tasks": tuple(groups),
                "separated_node_ratios": _ratios(devices),
            }
        )
        return not any(run_device_errors(config.model_copy(update={"trainer": trainer})))

    return is_allowed


def _ratios(devices: Sequence[int]) -> tuple[float, ...]:
    """Return the shares of the devices, whose sum is 1."""
    first = [round(count / sum(devices), 6) for count in devices[:-1]]
    return (*first, round(1 - sum(first), 6))


def format_seconds(seconds: float) -> str:
    """Format a duration with its unit."""
    return f"{format_number(seconds)} s"
