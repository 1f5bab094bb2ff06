# SPDX-License-Identifier: Apache-2.0
"""No two workers take one device, whatever it is called."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.errors import UserError
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CPU, CUDA
from tandem.platforms.registry import platform_named
from tandem.runtime.ray_cluster import require_distinct
from tandem.runtime.worker_process import WorkerInfo

PLATFORMS = {"train": CUDA, "generate": CUDA, "score": platform_named("npu"), "host": CPU}
HERE, THERE = "10.0.0.1", "10.0.0.2"


def worker(pool: str, device: str, *, address: str = HERE) -> WorkerInfo:
    place = WorkerPlace(pool, 0, 1, node=0, node_address=address, physical_id=device)
    return WorkerInfo(place, f"CUDA_VISIBLE_DEVICES={device}", "one.host", pid=1, log="")


def check(first: WorkerInfo, second: WorkerInfo, uuids: Sequence[str]) -> None:
    require_distinct([first, second], uuids, platforms=PLATFORMS)


def test_a13_one_chip_under_two_names_is_found_by_its_uuid() -> None:
    with pytest.raises(UserError) as caught:
        check(worker("train", "0"), worker("generate", "GPU-7c"), ["7c", "7c"])
    assert str(caught.value) == (
        "device 7c of one.host: train rank 0 (as device 0) and generate rank 0 (as device GPU-7c) "
        "were both given it (CUDA_VISIBLE_DEVICES=GPU-7c). Unset what makes Ray share devices, or "
        "what lists one by two names."
    )


def test_a13_one_name_twice_is_found_where_the_driver_tells_no_uuid() -> None:
    with pytest.raises(UserError, match="device 0 of one.host: train rank 0 .* and generate"):
        check(worker("train", "0"), worker("generate", "0"), ["", ""])


@pytest.mark.parametrize(
    ("second", "uuids"),
    [
        (worker("generate", "1"), ["7c", "8d"]),
        (worker("generate", "1"), ["", ""]),
        (worker("generate", "0", address=THERE), ["7c", "7c"]),
        (worker("score", "0"), ["", ""]),
    ],
)
def test_devices_that_differ_are_told_apart(second: WorkerInfo, uuids: Sequence[str]) -> None:
    check(worker("train", "0"), second, uuids)


def test_parts_of_one_device_and_processes_of_the_host_share_what_they_may() -> None:
    check(worker("train", "MIG-1"), worker("generate", "MIG-2"), ["7c", "7c"])
    check(worker("host", ""), worker("host", ""), ["", ""])
