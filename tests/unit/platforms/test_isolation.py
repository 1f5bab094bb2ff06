# SPDX-License-Identifier: Apache-2.0
"""A13: the table of which environment and index follow from what was assigned and inherited."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tandem.errors import UserError
from tandem.platforms.isolation import (
    CUDA_LIKE,
    HOST,
    Visibility,
    apply_isolation,
    is_restricted,
    plan_isolation,
)
from tandem.platforms.vendors import ASCEND, MLU, MUSA, XPU

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"
NPU = "ASCEND_RT_VISIBLE_DEVICES"
MTHREADS = "MUSA_VISIBLE_DEVICES"
ONEAPI = "ONEAPI_DEVICE_SELECTOR"
CAMBRICON = "MLU_VISIBLE_DEVICES"
NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
NOSET_NPU = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}
UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER_UUID = "GPU-1111f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"
NEW_MIG = "MIG-3eb87630-93d5-b2b6-b8ff-9b359caf4ee2"

# (platform, assigned, inherited, node_visible, (set, unset, physical))
MASKED = [
    (CUDA_LIKE, "0", {}, "", ({CUDA: "0"}, (), "0")),
    (CUDA_LIKE, "3", {}, "", ({CUDA: "3"}, (), "3")),
    (CUDA_LIKE, "3", {}, "0,1,2,3", ({CUDA: "3"}, (), "3")),
    (CUDA_LIKE, "3", {CUDA: "3"}, "", ({CUDA: "3"}, (), "3")),
    (CUDA_LIKE, "5", {CUDA: "4,5,6,7"}, "", ({CUDA: "5"}, (), "5")),
    (CUDA_LIKE, "5", {CUDA: "4,5,6,7"}, "4,5,6,7", ({CUDA: "5"}, (), "5")),
    (CUDA_LIKE, "1", {CUDA: "4,5,6,7"}, "", ({CUDA: "5"}, (), "5")),
    (CUDA_LIKE, "1", {CUDA: "4,5,6,7"}, "0,1,2,3", ({CUDA: "5"}, (), "5")),
    (CUDA_LIKE, "3", {CUDA: "4, 5, 6, 7"}, "0,1,2,3", ({CUDA: "7"}, (), "7")),
    (CUDA_LIKE, "1", {CUDA: "1,2"}, "1,2", ({CUDA: "1"}, (), "1")),
    (CUDA_LIKE, "1", {CUDA: "1,2"}, "0,1", ({CUDA: "2"}, (), "2")),
    (CUDA_LIKE, "2", {CUDA: "1,2"}, "0,1,2,3", ({CUDA: "2"}, (), "2")),
    (CUDA_LIKE, "2", {CUDA: "2"}, "0,1,2,3", ({CUDA: "2"}, (), "2")),
    (CUDA_LIKE, "1", {CUDA: "0,1,2,3"}, "", ({CUDA: "1"}, (), "1")),
    (CUDA_LIKE, "0", {CUDA: "0,-1,3"}, "", ({CUDA: "0"}, (), "0")),
    (CUDA_LIKE, UUID, {}, "", ({CUDA: UUID}, (), UUID)),
    (CUDA_LIKE, UUID, {CUDA: f"{OTHER_UUID},{UUID}"}, "", ({CUDA: UUID}, (), UUID)),
    (CUDA_LIKE, "0", {CUDA: f"{OTHER_UUID},{UUID}"}, "0,1", ({CUDA: OTHER_UUID}, (), OTHER_UUID)),
    (CUDA_LIKE, MIG, {CUDA: MIG}, "", ({CUDA: MIG}, (), MIG)),
    (CUDA_LIKE, NEW_MIG, {CUDA: f"{MIG},{NEW_MIG}"}, "", ({CUDA: NEW_MIG}, (), NEW_MIG)),
    (CUDA_LIKE, "1", {CUDA: f"{MIG},{NEW_MIG}"}, "", ({CUDA: NEW_MIG}, (), NEW_MIG)),
    (CUDA_LIKE, "6", {HIP: "4,5,6,7"}, "", ({CUDA: "6"}, (HIP,), "6")),
    (CUDA_LIKE, "6", {HIP: "6,7", CUDA: "6,7"}, "", ({CUDA: "6"}, (HIP,), "6")),
    (CUDA_LIKE, "2", {ROCR: "4,5,6,7"}, "0,1,2,3", ({CUDA: "6"}, (ROCR,), "6")),
    (CUDA_LIKE, "0", {NPU: "7", "PATH": "/bin"}, "", ({CUDA: "0"}, (), "0")),
    (ASCEND, "2", {}, "", ({NPU: "2"}, (), "2")),
    (ASCEND, "6", {NPU: "4,5,6,7"}, "", ({NPU: "6"}, (), "6")),
    (ASCEND, "2", {NPU: "4,5,6,7"}, "0,1,2,3", ({NPU: "6"}, (), "6")),
    (ASCEND, "6", {NPU: "6"}, "", ({NPU: "6"}, (), "6")),
    (XPU, "1", {}, "", ({ONEAPI: "level_zero:1"}, (), "1")),
    (XPU, "3", {ONEAPI: "level_zero:2,3"}, "", ({ONEAPI: "level_zero:3"}, (), "3")),
    (MLU, "1", {}, "0,1", ({CAMBRICON: "1"}, (), "1")),
    (MLU, "1", {CAMBRICON: "4,5", CUDA: "0"}, "0,1", ({CAMBRICON: "5"}, (), "5")),
    # Ray leaves the variable alone where it is told to: nothing, or what the node inherited.
    (CUDA_LIKE, "2", NOSET, "", ({CUDA: "2"}, (), "2")),
    (CUDA_LIKE, "2", {**NOSET, CUDA: "4,5,6,7"}, "0,1,2,3", ({CUDA: "6"}, (), "6")),
    (CUDA_LIKE, "6", {**NOSET, CUDA: "4,5,6,7"}, "4,5,6,7", ({CUDA: "6"}, (), "6")),
    (CUDA_LIKE, UUID, {**NOSET, CUDA: UUID}, "", ({CUDA: UUID}, (), UUID)),
    (ASCEND, "3", {**NOSET_NPU, NPU: "4,5,6,7"}, "0,1,2,3", ({NPU: "7"}, (), "7")),
    # A share of a device is that device: Ray shows the same one to all who share it.
    (CUDA_LIKE, "0", {CUDA: "0"}, "0", ({CUDA: "0"}, (), "0")),
    (ASCEND, "5", {NPU: "5"}, "5", ({NPU: "5"}, (), "5")),
]


@pytest.mark.parametrize(("platform", "assigned", "inherited", "node_visible", "expected"), MASKED)
def test_a13_a_masking_platform_shows_a_process_its_device_alone(
    platform: Visibility,
    assigned: str,
    inherited: dict[str, str],
    node_visible: str,
    expected: tuple[dict[str, str], tuple[str, ...], str],
) -> None:
    visible = node_visible.split(",") if node_visible else ()
    plan = plan_isolation(platform, [assigned], inherited=inherited, node_visible=visible)
    assert (dict(plan.env_set), plan.env_unset, plan.physical_id) == expected
    assert plan.local_index == 0


# (assigned, inherited, node_visible, index, physical)
SELECTED = [
    ("0", {}, "", 0, "0"),
    ("5", {}, "", 5, "5"),
    ("0", {MTHREADS: "4,5,6,7"}, "0,1,2,3", 0, "4"),
    ("3", {MTHREADS: "4,5,6,7"}, "0,1,2,3", 3, "7"),
    ("1", {MTHREADS: "1,2"}, "0,1", 1, "2"),
    ("6", {MTHREADS: "4,5,6,7"}, "", 2, "6"),
    ("1", {MTHREADS: "4,5,6,7", CUDA: "1"}, "0,1,2,3", 1, "5"),
    ("1", {MTHREADS: f"{OTHER_UUID},{UUID}"}, "0,1", 1, UUID),
]


@pytest.mark.parametrize(("assigned", "inherited", "node_visible", "index", "physical"), SELECTED)
def test_a13_a_selecting_platform_leaves_the_environment_and_picks_the_index(
    assigned: str, inherited: dict[str, str], node_visible: str, index: int, physical: str
) -> None:
    visible = node_visible.split(",") if node_visible else ()
    plan = plan_isolation(MUSA, [assigned], inherited=inherited, node_visible=visible)
    assert (plan.env_set, plan.env_unset) == ((), ())
    assert (plan.local_index, plan.physical_id) == (index, physical)


# (platform, assigned, inherited, node_visible, words of the message)
REJECTED = [
    (CUDA_LIKE, [], {}, "", "exactly one device"),
    (CUDA_LIKE, ["0", "1"], {}, "", "exactly one device"),
    (CUDA_LIKE, ["0,1"], {}, "", "exactly one device"),
    (CUDA_LIKE, ["0"], {CUDA: ""}, "", "hides all devices"),
    (CUDA_LIKE, ["0"], {CUDA: "-1"}, "", "hides all devices"),
    (CUDA_LIKE, ["0"], {CUDA: "NoDevFiles"}, "", "hides all devices"),
    (CUDA_LIKE, ["3"], {CUDA: "0,-1,3"}, "", "not among them"),
    (CUDA_LIKE, ["2"], {CUDA: "4,5"}, "", "not among them"),
    (CUDA_LIKE, ["1"], {CUDA: "1,2"}, "", "name of one device here and the position of another"),
    (CUDA_LIKE, ["0"], {CUDA: "1,0"}, "0,1", "the position of another"),
    (CUDA_LIKE, ["4"], {}, "0,1,2,3", "this node has 0,1,2,3"),
    (CUDA_LIKE, ["0"], {CUDA: "0,0"}, "", "twice"),
    (CUDA_LIKE, ["0"], {CUDA: "all"}, "", "not a list of devices"),
    (CUDA_LIKE, ["0"], {CUDA: "0;1"}, "", "not a list of devices"),
    (CUDA_LIKE, ["0"], {CUDA: "0,,1"}, "", "not a list of devices"),
    (CUDA_LIKE, ["0"], {CUDA: "0,1", HIP: "2,3"}, "", "differ"),
    (CUDA_LIKE, ["0"], {ROCR: "4,5", HIP: "0,1"}, "", "count within the first"),
    (CUDA_LIKE, ["0"], {ROCR: "4,5", CUDA: "0"}, "", "count within the first"),
    (XPU, ["0"], {ONEAPI: "*:gpu"}, "", "level_zero:0,1"),
    (XPU, ["0"], {ONEAPI: "0,1"}, "", "level_zero:0,1"),
    (CUDA_LIKE, ["1"], {**NOSET, CUDA: ""}, "", "hides all devices"),
    (ASCEND, ["0"], {NPU: ""}, "0", "hides all devices"),
    (ASCEND, ["4", "5"], {NPU: "4,5"}, "", "exactly one device"),
    (MLU, ["3"], {CAMBRICON: "0,1"}, "", "not among them"),
    (MUSA, [UUID], {}, "", "has no index"),
    (MUSA, ["0"], {MTHREADS: "1,0"}, "0,1", "the position of another"),
    (MUSA, ["0"], {MTHREADS: ""}, "0", "hides all devices"),
]


@pytest.mark.parametrize(("platform", "assigned", "inherited", "node_visible", "message"), REJECTED)
def test_what_can_be_read_in_two_ways_or_in_none_is_rejected(
    platform: Visibility,
    assigned: list[str],
    inherited: dict[str, str],
    node_visible: str,
    message: str,
) -> None:
    visible = node_visible.split(",") if node_visible else ()
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        plan_isolation(platform, assigned, inherited=inherited, node_visible=visible)


@pytest.mark.parametrize("inherited", [{}, {CUDA: ""}, {CUDA: "0,0", MTHREADS: "x"}])
def test_processes_without_a_device_are_left_alone(inherited: dict[str, str]) -> None:
    plan = plan_isolation(HOST, [], inherited=inherited)
    assert str(plan) == "nothing to isolate"
    assert (plan.env_set, plan.env_unset, plan.local_index) == ((), (), 0)


def test_plan_is_applied_to_an_environment_and_can_be_read() -> None:
    environment = {CUDA: "4,5", HIP: "4,5", "HOME": "/root"}
    plan = plan_isolation(CUDA_LIKE, ["5"], inherited=environment)
    apply_isolation(plan, environment)
    assert environment == {CUDA: "5", "HOME": "/root"}
    assert str(plan) == f"{CUDA}=5, no {HIP}, device 5 as index 0"


def test_planning_again_in_the_isolated_environment_changes_nothing() -> None:
    environment = {CUDA: "4,5,6,7"}
    first = plan_isolation(
        CUDA_LIKE, ["2"], inherited=environment, node_visible=["0", "1", "2", "3"]
    )
    apply_isolation(first, environment)
    again = plan_isolation(CUDA_LIKE, [first.physical_id], inherited=environment)
    assert (again.env_set, again.physical_id) == (first.env_set, "6")


def test_isolation_is_planned_without_torch() -> None:
    code = (
        "import sys, tandem.platforms.isolation, tandem.platforms.place,"
        " tandem.runtime.worker_process, tandem.runtime.ray;"
        " print(sorted({'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_the_table_has_forty_cases_and_more() -> None:
    """A13 asks for them."""
    assert len(MASKED) + len(SELECTED) + len(REJECTED) >= 40


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, False), ({CUDA: ""}, True), ({ROCR: "1"}, True), ({NPU: "1"}, False)],
)
def test_an_empty_list_restricts_and_a_foreign_one_does_not(
    environment: dict[str, str], expected: bool
) -> None:
    assert is_restricted(CUDA_LIKE, environment) is expected
