# SPDX-License-Identifier: Apache-2.0
"""Metrics of episodes of several turns; there are none if every sample is a single turn."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from tandem.types import Group, ToolStatus, Trajectory


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Compute turns, calls, ends and waits of the episodes of a step."""
    samples = [sample.trajectory for group in groups for sample in group.samples]
    played = [(sample, record) for sample in samples if (record := sample.episode) is not None]
    if not played:
        return {}
    records = [record for _, record in played]
    turns = [float(record.num_turns) for record in records]
    calls = [float(len(record.statuses)) for record in records]
    waits = [sum(record.waits_s) for record in records]
    statuses = Counter(status for record in records for status in record.statuses)
    ends = Counter(record.end for record in records)
    forks = Counter(reason for record in records for reason in record.forks)
    return {
        "num_turns/mean": statistics.fmean(turns),
        "num_turns/max": max(turns),
        "num_turns/min": min(turns),
        "agent/calls/mean": statistics.fmean(calls),
        "agent/calls/max": max(calls),
        **{f"agent/calls/{status.value}": float(n) for status, n in statuses.items()},
        "agent/malformed_share": statuses[ToolStatus.MODEL_ERROR] / max(sum(calls), 1.0),
        **{f"agent/end/{end.value}": n / len(records) for end, n in ends.items()},
        **{f"agent/forks/{reason}": float(count) for reason, count in forks.items()},
        "agent/failed": float(sum(record.end.is_fault for record in records)),
        "agent/wait_s/mean": statistics.fmean(waits),
        "agent/wait_s/max": max(waits),
        "agent/drawn_tokens/mean": statistics.fmean(_drawn(sample) for sample, _ in played),
        "agent/given_share": 1 - _share_drawn([sample for sample, _ in played]),
    }


def _drawn(trajectory: Trajectory) -> int:
    return trajectory.num_drawn_tokens


def _share_drawn(trajectories: Sequence[Trajectory]) -> float:
    num_tokens = sum(len(trajectory.response_ids) for trajectory in trajectories)
    return sum(map(_drawn, trajectories)) / max(num_tokens, 1)
