# SPDX-License-Identifier: Apache-2.0
"""A13, live: what Ray hands out and a worker inherited becomes one device, on doubles of a node
with eight. The driver is a process of its own, as it looks at its node's devices.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CPU, Platform
from tandem.runtime.cluster import ClusterSettings, plan_cluster
from tandem.runtime.ray import RayRuntime
from tandem.testing.processes import Here, Launch, ProcessError, run_processes

NPU = "ASCEND_RT_VISIBLE_DEVICES"
MUSA = "MUSA_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
NUM_DEVICES = 8
SLICE = "4,5,6,7"


class Probe:
    """What a worker holds: it tells which device it uses, and by what."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place

    def tell(self) -> dict[str, Any]:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, "this process has devices"
        module: Any = torch.get_device_module(accelerator.type)
        current = module.current_device()
        return {
            "planned": (self.place.device_index, self.place.physical_id),
            "used": (current, str(module.get_device_properties(current).uuid)),
            "tensor": str(torch.empty(1, device=accelerator.type).device),
            "seen": module.device_count(),
            "environment": {name: os.environ.get(name) for name in (NPU, MUSA, CUDA)},
        }


def drive(
    here: Here, platform: Platform, resources: dict[str, Any], *, size: int
) -> list[dict[str, Any]]:
    """All workers, by rank."""
    del here
    assert platform.is_available(), "commands ask this before they start anything"
    plan = plan_cluster(ClusterSettings(1, size, ray_init=resources), {})
    with RayRuntime(plan, platform=platform, pools={"train": [0] * size}) as runtime:
        group = runtime.start_pools({"train": Probe})["train"]
        return group.gather([group.submit(rank, "tell") for rank in range(size)])


def run(
    platform: Platform, resources: dict[str, Any], *, size: int = 2, **environment: str
) -> list[dict[str, Any]]:
    launch = Launch(timeout_s=600.0, joined=False, environment=environment)
    driver = partial(drive, size=size)
    return run_processes(driver, [CPU], launch=launch, args=(platform, resources))[0]


def require_apart(told: list[dict[str, Any]], *, vendor: str) -> list[str]:
    """Each worker uses the device that was planned, and no two the same. Their physical ids."""
    for one in told:
        index, physical = one["planned"]
        assert one["used"] == (index, f"double-{vendor}-{physical}")
        assert one["tensor"] == f"{vendor}:{index}"
    ids = [one["planned"][1] for one in told]
    assert len(set(ids)) == 2
    return ids


SWITCHES = (
    {},
    pytest.param({"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}, marks=pytest.mark.deep),
)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a13_masked_workers_of_a_slice_see_their_device_alone(
    doubles: Callable[..., Platform], switch: dict[str, str]
) -> None:
    platform = doubles("npu", num_devices=NUM_DEVICES)
    told = run(platform, {"resources": {"NPU": 4}}, **{NPU: SLICE}, **switch)
    for physical, one in zip(require_apart(told, vendor="npu"), told, strict=True):
        assert physical in SLICE.split(",")
        assert (one["seen"], one["environment"][NPU]) == (1, physical)


@pytest.mark.deep
def test_a13_selecting_workers_of_a_slice_use_theirs_by_index(
    doubles: Callable[..., Platform],
) -> None:
    """The operator's list stays, whatever Ray does to variables of others."""
    platform = doubles("musa", num_devices=NUM_DEVICES)
    environment = {MUSA: SLICE, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
    told = run(platform, {"num_gpus": 4}, **environment)
    for physical, one in zip(require_apart(told, vendor="musa"), told, strict=True):
        assert one["planned"][0] == SLICE.split(",").index(physical)
        assert (one["seen"], one["environment"][MUSA]) == (4, SLICE)


def _one_chip(_: int | None) -> str:
    return "one chip"


@pytest.mark.deep
def test_a13_two_workers_of_one_chip_are_refused(doubles: Callable[..., Platform]) -> None:
    platform = replace(doubles("npu", num_devices=NUM_DEVICES), device_uuid=_one_chip)
    with pytest.raises(ProcessError, match="device one chip of .*: train rank 0 .*train rank 1"):
        run(platform, {"resources": {"NPU": 2}}, **{NPU: "4,5"})
