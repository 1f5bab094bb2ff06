# SPDX-License-Identifier: Apache-2.0
"""The resources of runs on nodes of several vendors, and the refusal of runs that do not fit."""

from __future__ import annotations

import pytest

from tandem.errors import UserError
from tandem.platforms.record import CPU, CUDA, Platform
from tandem.platforms.registry import platform_named
from tandem.runtime.cluster import ClusterSettings, NodeDevices, node_resources
from tandem.runtime.resources import (
    NodeState,
    fits,
    is_marked,
    marker_of,
    node_needs,
    num_equipped,
    refusal,
    this_machine,
)

TWO = ClusterSettings(num_nodes=2, devices_per_node=2)
NPU, MUSA = platform_named("npu"), platform_named("musa")


def test_a14_a_run_takes_a_little_of_the_marker_of_each_platform() -> None:
    pools = {"train": [0, 0], "score": [0], "generate": [1, 1, 1]}
    platforms = {"train": NPU, "score": CPU, "generate": MUSA}
    assert node_needs(pools, platforms, marked=True) == {
        0: {"CPU": 3, "NPU": 2, "acc_npu": 1e-4},
        1: {"CPU": 3, "GPU": 3, "acc_musa": 1e-4},
    }
    assert [marker_of(platform) for platform in (CPU, CUDA)] == ["", "acc_cuda"]
    unmarked = node_needs({"train": [0]}, {"train": CUDA}, marked=False)
    assert unmarked == {0: {"CPU": 1, "GPU": 1}}


def test_devices_that_ray_cannot_tell_apart_need_nodes_of_their_own() -> None:
    pools, platforms = {"train": [0], "generate": [0]}, {"train": CUDA, "generate": MUSA}
    with pytest.raises(UserError, match="devices of cuda and of musa, which Ray both calls GPU"):
        node_needs(pools, platforms, marked=True)


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
    nodes = [NodeState("here", total) for total in totals]
    assert is_marked(nodes, platforms) is expected


def test_each_planned_node_finds_one_of_its_own_whatever_the_order() -> None:
    both, npu = {"NPU": 2, "GPU": 2}, {"NPU": 2}
    assert fits([{"NPU": 1}, {"GPU": 1}], [both, npu])
    assert fits([{"GPU": 1}, {"NPU": 1}], [both, npu])
    assert not fits([{"GPU": 1}, {"GPU": 1}], [both, npu])
    assert not fits([{"NPU": 3}], [both, npu])
    assert fits([], [])


def test_nodes_without_any_device_do_not_complete_a_cluster() -> None:
    head = {"CPU": 8, "memory": 1e9, "object_store_memory": 1e9, "node:10.0.0.1": 1}
    nodes = [head, head | {"GPU": 8}, head | {"NPU": 1, "acc_npu": 1}]
    assert num_equipped(nodes, [{"CPU": 1, "GPU": 1}] * 2) == 2
    assert num_equipped(nodes, [{"CPU": 1, "GPU": 1}, {"CPU": 1}]) == 3


@pytest.mark.parametrize(
    ("needs", "capacities", "expected"),
    [
        ([8, 8], [8, 8], True),
        ([4, 8], [8, 2, 4], True),
        ([8, 8], [16], False),
        ([8, 8], [12, 4], False),
        ([1, 1], [8, 0], False),
        ([4], [], False),
        ([], [], True),
    ],
)
def test_each_planned_node_needs_a_node_of_its_own(
    needs: list[int], capacities: list[int], expected: bool
) -> None:
    assert fits([{"GPU": n} for n in needs], [{"GPU": n} for n in capacities]) is expected


def test_a14_a_refusal_lists_what_there_is_of_each_platform() -> None:
    platforms = {"train": NPU, "generate": MUSA, "score": CPU}
    needs = node_needs({"train": [0, 0], "generate": [1], "score": [1]}, platforms, marked=True)
    nodes = [
        NodeState("10.0.0.1", {"CPU": 8, "NPU": 2, "acc_npu": 1}),
        NodeState("10.0.0.2", {"CPU": 4, "GPU": 2, "acc_cuda": 1}),
    ]
    assert str(refusal(needs, nodes, platforms=platforms, settings=TWO)) == (
        "trainer.n_gpus_per_node=2, trainer.nnodes=2: the nodes cannot hold the run. "
        "Needed: node 0 2 npu, 2 CPU; node 1 1 musa, 2 CPU. "
        "There: 10.0.0.1 2 npu, 8 CPU; 10.0.0.2 4 CPU. "
        "Start Ray on a node that has them with --resources='{\"acc_musa\": 1}', or name platforms "
        "that are there in pools.*.platform."
    )


def test_a_refusal_of_nodes_that_declare_no_platform_lists_what_each_has() -> None:
    """Each node has too little of one thing: GPUs of one, CPUs of the other."""
    platforms = {"train": CUDA}
    nodes = [
        NodeState("10.0.0.1", {"CPU": 1, "GPU": 8}),
        NodeState("10.0.0.2", {"CPU": 64}),
    ]
    needs = node_needs({"train": [0, 0]}, platforms, marked=is_marked(nodes, platforms))
    assert str(refusal(needs, nodes, platforms=platforms, settings=TWO)) == (
        "trainer.n_gpus_per_node=2, trainer.nnodes=2: the nodes cannot hold the run. "
        "Needed: node 0 2 GPU, 2 CPU. There: 10.0.0.1 8 GPU, 1 CPU; 10.0.0.2 64 CPU. "
        "Lower these, or use nodes with more; the number of CPUs is the one declared to Ray "
        "(ray_kwargs.ray_init.num_cpus, ray start --num-cpus)."
    )


@pytest.mark.parametrize(
    ("platform", "resources", "free", "message"),
    [
        (NPU, {"CPU": 8}, None, "Choose a platform that is there (trainer.device), or nodes"),
        (CUDA, {"CPU": 8, "GPU": 4}, None, "Lower these, or use nodes with more"),
        (CPU, {"CPU": 4}, None, "Needed: node 0 8 CPU. There: here 4 CPU. Lower these"),
        (
            CUDA,
            {"CPU": 8, "GPU": 8},
            {"CPU": 8, "GPU": 3},
            "others use what the run needs. Needed: node 0 8 GPU, 8 CPU. There: here 8 GPU, 8 CPU. "
            "Free: 3 GPU, 8 CPU. Wait until they have ended",
        ),
    ],
)
def test_a_refusal_says_what_helps(
    platform: Platform,
    resources: dict[str, float],
    free: dict[str, float] | None,
    message: str,
) -> None:
    platforms = {"train": platform}
    needs = node_needs({"train": [0] * 8}, platforms, marked=False)
    nodes = [NodeState("here", resources)]
    error = refusal(needs, nodes, platforms=platforms, settings=TWO, free=free)
    assert message in str(error)
    assert error.key == "trainer.n_gpus_per_node=2, trainer.nnodes"


def test_a_machine_without_a_platform_says_why() -> None:
    devices = [
        NodeDevices(NPU.visibility, 1, "acc_npu"),
        NodeDevices(MUSA.visibility, 0, "acc_musa", problem="no driver"),
    ]
    machine = this_machine(devices, num_cores=4)
    assert machine.resources == {"CPU": 4, "NPU": 1, "acc_npu": 1}
    platforms = {"train": NPU, "generate": MUSA}
    needs = node_needs({"train": [0], "generate": [0]}, platforms, marked=True)
    error = refusal(needs, [machine], platforms=platforms, settings=TWO)
    assert "There: this machine 1 npu, 0 musa (no driver), 4 CPU. Name platforms" in str(error)


def test_a_node_of_the_runs_own_cluster_declares_whose_devices_it_has() -> None:
    def declared(*devices: NodeDevices, **ray_init: object) -> dict[str, object]:
        settings = ClusterSettings(2, 2, ray_init=ray_init)
        return node_resources(devices, num_cores=4, settings=settings)

    npu = NodeDevices(NPU.visibility, 2, "acc_npu")
    musa = NodeDevices(MUSA.visibility, 3, "acc_musa")
    assert declared(npu) == {"num_cpus": 4, "resources": {"NPU": 2, "acc_npu": 1}}
    assert declared(musa) == {"num_cpus": 4, "num_gpus": 3, "resources": {"acc_musa": 1}}
    given = declared(npu, resources={"NPU": 1, "disk": 1})
    assert given["resources"] == {"NPU": 1, "acc_npu": 1, "disk": 1}
    assert declared() == {"num_cpus": 4}
