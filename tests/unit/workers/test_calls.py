# SPDX-License-Identifier: Apache-2.0
"""Workers that end after they were built and before the first version of weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tandem.api import Capacity, WorkerLost
from tandem.config.derived.pools import Placement, place_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.launch import RunSite, _write_placement
from tandem.platforms.record import CPU
from tandem.runtime.failure import Kind, Symptom, WorkerFailure, WorkerName
from tandem.workers.deployment import remote_engines


@dataclass
class StartedGroup:
    """A pool of one worker, which ends at a call of the method ``dies_in``."""

    dies_in: str
    size: int = 1

    def submit(self, rank: int, method: str, /, *args: Any) -> tuple[StartedGroup, str]:
        return self, method

    def gather(self, calls: Sequence[tuple[StartedGroup, str]]) -> list[Any]:
        for group, method in calls:
            if method == group.dies_in:
                symptom = Symptom(Kind.DIED, "it was killed", "", time_s=0.0)
                name = WorkerName("generate", 0, "here", 7)
                raise WorkerLost(0, WorkerFailure(name, method, symptom=symptom))
        return [Capacity(8, None) if method == "capacity" else {} for _, method in calls]


def _config(folder: Path) -> RunConfig:
    apart = ["actor_rollout_ref.hybrid_engine=False", "trainer.n_gpus_per_node=2"]
    restarts = "actor_rollout_ref.rollout.max_engine_restarts=2"
    local = f"trainer.default_local_dir={folder}"
    return load_config(RunConfig, ["data.train_files=some", *apart, restarts, local]).config


def _link(config: RunConfig, placement: Placement, groups: Any) -> None:
    remote_engines(groups, placement, rollout=config.actor_rollout_ref.rollout)


def _describe(config: RunConfig, placement: Placement, groups: Any) -> None:
    platforms = {pool.name: CPU for pool in placement.used_pools}
    _write_placement(RunSite(config, platforms, placement, None), groups)


@pytest.mark.parametrize(
    ("start", "method"), [(_link, "join_link"), (_link, "capacity"), (_describe, "describe")]
)
def test_a_worker_that_ends_before_weights_come_is_a_failure_and_not_replaced(
    tmp_path: Path, start: Callable[[RunConfig, Placement, Any], None], method: str
) -> None:
    config = _config(tmp_path)
    placement = place_run(config)
    generating = placement.pool_of("generate").name
    groups = {
        pool.name: StartedGroup(method if pool.name == generating else "")
        for pool in placement.used_pools
    }
    with pytest.raises(WorkerFailure, match=f"died in {method}: it was killed"):
        start(config, placement, groups)
