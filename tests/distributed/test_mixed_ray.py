# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster whose nodes have devices of different vendors (A14): each pool on its node, and
what no node can hold is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import ray
import torch
from ray.cluster_utils import Cluster

from tandem.errors import UserError
from tandem.platforms.place import WorkerPlace
from tandem.runtime.cluster import ClusterPlan, ClusterSettings, plan_cluster
from tandem.runtime.ray import RayRuntime
from tandem.testing.doubles import double_platform
from tests.fakes.patience import sooner_than

pytestmark = pytest.mark.usefixtures("doubles")

WAIT_S = 60
"""The time that a run waits for nodes, which a refusal does not."""
POOLS = {"train": [0], "generate": [1]}


@dataclass(frozen=True)
class Nodes:
    """A running cluster: how it is reached, and the ids of its nodes by what they have."""

    plan: ClusterPlan
    ids: dict[str, str]


class Probe:
    """What workers hold: they tell what they are and where."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place

    def tell(self) -> tuple[str, str, int]:
        """This process's Ray node, its accelerator, and how many of them it sees."""
        device = torch.accelerator.current_accelerator()
        assert device is not None
        node: str = ray.get_runtime_context().get_node_id()
        return node, device.type, torch.accelerator.device_count()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """One has NPUs and something that Ray calls a GPU; of the other, the GPU is a MUSA device."""
    cluster = Cluster()
    npu = cluster.add_node(num_cpus=2, num_gpus=1, resources={"NPU": 1, "acc_npu": 1})
    musa = cluster.add_node(num_cpus=2, num_gpus=1, resources={"acc_musa": 1})
    settings = ClusterSettings(num_nodes=2, devices_per_node=1, wait_s=WAIT_S)
    try:
        yield Nodes(
            plan_cluster(settings, {"RAY_ADDRESS": str(cluster.address)}),
            {"npu": npu.node_id, "musa": musa.node_id},
        )
    finally:
        cluster.shutdown()


def test_a14_each_pool_lands_on_the_node_of_its_platform(nodes: Nodes) -> None:
    for trains, generates in (("npu", "musa"), ("musa", "npu")):
        platforms = {"train": double_platform(trains), "generate": double_platform(generates)}
        with RayRuntime(
            nodes.plan, platform=platforms["train"], pools=POOLS, platforms=platforms
        ) as runtime:
            groups = runtime.start_pools({"train": Probe, "generate": Probe})
            told = {
                name: group.gather([group.submit(0, "tell")])[0] for name, group in groups.items()
            }
        for pool, name in (("train", trains), ("generate", generates)):
            node, device_type, seen = told[pool]
            assert (node, device_type) == (nodes.ids[name], name)
            assert seen == (1 if name == "npu" else 2), "MUSA devices are selected, NPUs masked"


def test_a14_what_no_node_can_hold_is_refused_at_once(nodes: Nodes) -> None:
    npu, mlu = double_platform("npu"), double_platform("mlu")
    with sooner_than(), pytest.raises(UserError) as caught:
        RayRuntime(nodes.plan, platform=npu, pools=POOLS, platforms={"train": npu, "generate": mlu})
    address = ray.util.get_node_ip_address()
    nodes_there = (f"{address} 1 npu, 2 CPU", f"{address} 2 CPU")
    assert str(caught.value) in [
        "trainer.n_gpus_per_node=1, trainer.nnodes=2: the nodes cannot hold the run. "
        "Needed: node 0 1 npu, 1 CPU; node 1 1 mlu, 1 CPU. "
        f"There: {'; '.join(order)}. "
        "Start Ray on a node that has them with --resources='{\"acc_mlu\": 1}', or name platforms "
        "that are there in pools.*.platform."
        for order in (nodes_there, nodes_there[::-1])
    ], "Ray lists two nodes of one address in any order"
