# SPDX-License-Identifier: Apache-2.0
"""The choice of a run's cluster, and the resources that its nodes declare."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.errors import UserError
from tandem.platforms.isolation import CUDA_LIKE, HOST
from tandem.platforms.vendors import MUSA
from tandem.runtime.cluster import (
    ClusterSettings,
    NodeDevices,
    node_resources,
    plan_cluster,
)

ONE = ClusterSettings(num_nodes=1, devices_per_node=8)
TWO = ClusterSettings(num_nodes=2, devices_per_node=8)
LAUNCHED = {"MASTER_ADDR": "node-a", "MASTER_PORT": "1234"}

# (settings, environment, (role, address, rank))
PLANS = [
    (ONE, {}, ("local", "", 0)),
    (ONE, LAUNCHED | {"RANK": "0"}, ("local", "", 0)),
    (ONE, {"RAY_ADDRESS": "local"}, ("local", "", 0)),
    (ONE, {"RAY_ADDRESS": "10.0.0.1:6379"}, ("existing", "10.0.0.1:6379", 0)),
    (TWO, {"RAY_ADDRESS": "auto"}, ("existing", "auto", 0)),
    (
        replace(TWO, ray_init={"address": "b:1"}),
        {"RAY_ADDRESS": "a:1"},
        ("existing", "b:1", 0),
    ),
    (TWO, LAUNCHED | {"RANK": "0"}, ("head", "node-a:1234", 0)),
    (TWO, LAUNCHED | {"RANK": "1"}, ("member", "node-a:1234", 1)),
    (TWO, LAUNCHED | {"NODE_RANK": "1", "RANK": "8"}, ("member", "node-a:1234", 1)),
    (TWO, {"MASTER_ADDR": "node-a", "NODE_RANK": "0"}, ("head", "node-a:29500", 0)),
    (TWO, LAUNCHED | {"RANK": "1", "RAY_ADDRESS": "a:1"}, ("existing", "a:1", 0)),
    (TWO, LAUNCHED | {"RANK": "1", "MASTER_PORT": "65535"}, ("member", "node-a:65535", 1)),
    (
        replace(ONE, ray_init={"num_cpus": None, "num_gpus": 2.0, "resources": {"x": 1}}),
        {},
        ("local", "", 0),
    ),
]


@pytest.mark.parametrize(("settings", "environment", "expected"), PLANS)
def test_settings_and_environment_decide_the_cluster(
    settings: ClusterSettings, environment: dict[str, str], expected: tuple[str, str, int]
) -> None:
    plan = plan_cluster(settings, environment)
    assert (plan.role, plan.address, plan.node_rank) == expected


# (settings, environment, words of the message)
REFUSED = [
    (TWO, {}, "ray start --head"),
    (TWO, {}, "ray start --address="),
    (TWO, {"MASTER_ADDR": "node-a"}, "NODE_RANK"),
    (TWO, {"RANK": "1"}, "MASTER_ADDR"),
    (TWO, LAUNCHED | {"RANK": "2"}, "RANK=2: must be below trainer.nnodes=2"),
    (TWO, LAUNCHED | {"RANK": "-1"}, "RANK='-1'"),
    (TWO, LAUNCHED | {"RANK": "0", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    (TWO, LAUNCHED | {"RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT=99999: must be from 1"),
    (TWO, LAUNCHED | {"RANK": "1", "MASTER_PORT": "65536"}, "MASTER_PORT=65536: must be from 1"),
    (TWO, LAUNCHED | {"RANK": "1", "MASTER_PORT": "0"}, "MASTER_PORT=0: must be from 1 to 65535"),
    (replace(ONE, ray_init={"num_cpus": "abc"}), {}, "ray_kwargs.ray_init.num_cpus='abc': must be"),
    (replace(ONE, ray_init={"num_gpus": 0.5}), {}, "ray_kwargs.ray_init.num_gpus=0.5: must be a"),
    (replace(ONE, ray_init={"num_cpus": -1}), {}, "ray_kwargs.ray_init.num_cpus=-1: must be a w"),
    (
        replace(ONE, ray_init={"object_store_memory": "1g"}),
        {},
        "ray_kwargs.ray_init.object_store_memory='1g': must be a whole number",
    ),
    (replace(ONE, ray_init={"resources": "abc"}), {}, "ray_init.resources='abc': must map names"),
    (replace(ONE, ray_init={"resources": {"x": None}}), {}, "ray_init.resources.x=None: must be"),
    (ONE, {"RAY_ADDRESS": "ray://head:10001"}, "RAY_ADDRESS='ray://head:10001'"),
    (ONE, {"RAY_ADDRESS": "head"}, "HOST:PORT"),
    (replace(ONE, ray_init={"address": "head"}), {}, "ray_kwargs.ray_init.address='head'"),
]


@pytest.mark.parametrize(("settings", "environment", "message"), REFUSED)
def test_what_names_no_cluster_is_refused(
    settings: ClusterSettings, environment: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError) as raised:
        plan_cluster(settings, environment)
    assert message in str(raised.value)


def test_nodes_declare_what_ray_cannot_find() -> None:
    def resources(visibility, **ray_init):
        settings = replace(ONE, ray_init=ray_init)
        return node_resources([NodeDevices(visibility, 4)], num_cores=2, settings=settings)

    assert resources(HOST) == {"num_cpus": 8}
    assert resources(CUDA_LIKE) == {"num_cpus": 8}
    assert resources(MUSA) == {"num_cpus": 8, "num_gpus": 4}
    assert resources(HOST, num_cpus=3, namespace="x") == {"num_cpus": 3}
