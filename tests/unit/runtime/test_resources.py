# SPDX-License-Identifier: Apache-2.0
"""What runs take of nodes of several vendors, and what is said where nodes have not got it."""

from __future__ import annotations

import pytest

from tandem.errors import UserError
from tandem.platforms.record import CPU, CUDA, Platform
from tandem.platforms.registry import platform_named
from tandem.runtime.cluster import ClusterSettings, OwnDevices, node_resources
from tandem.runtime.resources import (
    NodeState,
    demands,
    is_held,
    is_marked,
    marker_of,
    num_equipped,
    refuse,
)

NPU, MUSA = platform_named("npu"), platform_named("musa")


def test_a14_a_run_takes_a_little_of_the_marker_of_each_platform() -> None:
    pools = {"train": [0, 0], "score": [0], "generate": [1, 1, 1]}
    platforms = {"train": NPU, "score": CPU, "generate": MUSA}
    assert demands(pools, platforms, marked=True) == {
        0: {"CPU": 3, "NPU": 2, "acc_npu": 1e-4},
        1: {"CPU": 3, "GPU": 3, "acc_musa": 1e-4},
    }
    assert [marker_of(platform) for platform in (CPU, CUDA)] == ["", "acc_cuda"]
    unmarked = demands({"train": [0]}, {"train": CUDA}, marked=False)
    assert unmarked == {0: {"CPU": 1, "GPU": 1}}


def test_devices_that_ray_cannot_tell_apart_need_nodes_of_their_own() -> None:
    pools, platforms = {"train": [0], "generate": [0]}, {"train": CUDA, "generate": MUSA}
    with pytest.raises(UserError, match="devices of cuda and of musa, which Ray both calls GPU"):
        demands(pools, platforms, marked=True)


@pytest.mark.parametrize(
    ("totals", "platforms", "expected"),
    [
        ([{"GPU": 8}], {"train": CUDA}, False),
        ([{"GPU": 8}], {"train": CUDA, "generate": MUSA}, True),
        ([{"GPU": 8, "acc_cuda": 1}, {"GPU": 8, "acc_musa": 1}], {"train": CUDA}, True),
    ],
)
def test_markers_are_asked_for_where_they_decide(
    totals: list[dict[str, float]], platforms: dict[str, Platform], expected: bool
) -> None:
    nodes = [NodeState("here", total, {}) for total in totals]
    assert is_marked(nodes, platforms) is expected


def test_each_planned_node_finds_one_of_its_own_whatever_the_order() -> None:
    both, npu = {"NPU": 2, "GPU": 2}, {"NPU": 2}
    assert is_held([{"NPU": 1}, {"GPU": 1}], [both, npu])
    assert is_held([{"GPU": 1}, {"NPU": 1}], [both, npu])
    assert not is_held([{"GPU": 1}, {"GPU": 1}], [both, npu])
    assert not is_held([{"NPU": 3}], [both, npu])
    assert is_held([], [])


def test_nodes_without_any_device_do_not_complete_a_cluster() -> None:
    head = {"CPU": 8, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1}
    nodes = [head, head | {"GPU": 8}, head | {"NPU": 1, "acc_npu": 1}]
    assert num_equipped(nodes, [{"CPU": 1, "GPU": 1}] * 2) == 2
    assert num_equipped(nodes, [{"CPU": 1, "GPU": 1}, {"CPU": 1}]) == 3


def test_a14_a_refusal_lists_what_is_free_of_each_platform() -> None:
    platforms = {"train": NPU, "generate": MUSA, "score": CPU}
    needs = demands({"train": [0, 0], "generate": [1], "score": [1]}, platforms, marked=True)
    nodes = [
        NodeState("10.0.0.1", {"CPU": 8, "NPU": 2, "acc_npu": 1}, {"CPU": 8, "NPU": 1}),
        NodeState("10.0.0.2", {"CPU": 4, "GPU": 2, "acc_cuda": 1}, {"CPU": 4, "GPU": 2}),
    ]
    assert str(refuse(needs, nodes, platforms=platforms)) == (
        "pools.*.platform: the cluster's 2 node(s) cannot hold the run "
        "(node 0: 2 npu; node 1: 1 musa and 1 cpu). "
        "Free: npu 1 of 2 on 10.0.0.1, musa 0 of 0, cpu 12 of 12 on 10.0.0.1, 10.0.0.2. "
        "Start Ray on a node that has them with --resources='{\"acc_musa\": 1}', or name platforms "
        "that are there in pools.*.platform."
    )


def test_a_refusal_of_nodes_that_say_nothing_lists_what_each_has() -> None:
    """Each node has too little of one thing: GPUs of one, CPUs of the other."""
    platforms = {"train": CUDA}
    nodes = [
        NodeState("10.0.0.1", {"CPU": 1, "GPU": 8}, {"CPU": 1, "GPU": 7}),
        NodeState("10.0.0.2", {"CPU": 64}, {"CPU": 64}),
    ]
    needs = demands({"train": [0, 0]}, platforms, marked=is_marked(nodes, platforms))
    assert str(refuse(needs, nodes, platforms=platforms)) == (
        "trainer.n_gpus_per_node: no node has all that one of the run needs "
        "(node 0: 2 CPU and 2 GPU). There are: 1 CPU and 8 GPU on 10.0.0.1, 64 CPU on 10.0.0.2. "
        "Lower trainer.n_gpus_per_node, or start Ray with more on a node (--num-cpus)."
    )


def test_a_node_of_the_runs_own_cluster_declares_whose_devices_it_has() -> None:
    def declared(*devices: OwnDevices, **ray_init: object) -> dict[str, object]:
        settings = ClusterSettings(2, 2, ray_init=ray_init)
        return node_resources(devices, num_cores=4, settings=settings)

    npu = OwnDevices(NPU.visibility, 2, "acc_npu")
    musa = OwnDevices(MUSA.visibility, 3, "acc_musa")
    assert declared(npu) == {"num_cpus": 4, "resources": {"NPU": 2, "acc_npu": 1}}
    assert declared(musa) == {"num_cpus": 4, "num_gpus": 3, "resources": {"acc_musa": 1}}
    given = declared(npu, resources={"NPU": 1, "disk": 1})
    assert given["resources"] == {"NPU": 1, "acc_npu": 1, "disk": 1}
    assert declared() == {"num_cpus": 4}
