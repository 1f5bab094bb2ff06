# SPDX-License-Identifier: Apache-2.0
"""What torchrun's variables mean. ``tests/distributed/test_torchrun.py`` starts real processes."""

from __future__ import annotations

import pytest

from tandem.errors import UserError
from tandem.runtime.torchrun import launched_node, run_as_launched, with_launched_devices

LAUNCH = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in LAUNCH.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_torchrun_a_command_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert launched_node({"RANK": "1", "WORLD_SIZE": "8"}) is None
    assert with_launched_devices(["a=b"]) == ["a=b"]
    assert run_as_launched(len, ["train", "a=b"]) == 2


@pytest.mark.usefixtures("launched")
def test_torchruns_options_set_the_numbers_of_devices_and_nodes() -> None:
    devices, nodes = "trainer.n_gpus_per_node=4", "trainer.nnodes=2"
    assert with_launched_devices(["a=b"]) == ["a=b", devices, nodes]
    assert with_launched_devices([devices]) == [devices, devices, nodes]


@pytest.mark.usefixtures("launched")
def test_a_key_that_contradicts_torchrun_is_refused() -> None:
    with pytest.raises(UserError, match="trainer.nnodes='1': torchrun started 4 .* 2 node"):
        with_launched_devices(["+trainer.nnodes=1"])


@pytest.mark.parametrize("name", [name for name in LAUNCH if name != "TORCHELASTIC_RUN_ID"])
def test_a_variable_of_torchrun_that_is_missing_is_named(
    name: str, launched: pytest.MonkeyPatch
) -> None:
    launched.delenv(name)
    with pytest.raises(UserError, match=f"variable {name}: is not set, which torchrun sets. Start"):
        with_launched_devices([])


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5"])
def test_a_variable_of_torchrun_that_is_no_number_is_refused(
    value: str, launched: pytest.MonkeyPatch
) -> None:
    launched.setenv("LOCAL_RANK", value)
    with pytest.raises(UserError, match=f"LOCAL_RANK='{value}': is not a number"):
        run_as_launched(len, [])


def test_nodes_with_different_numbers_of_processes_are_refused(
    launched: pytest.MonkeyPatch,
) -> None:
    launched.setenv("WORLD_SIZE", "7")
    with pytest.raises(UserError, match="nproc_per_node=4: must be the same on each of the 2"):
        with_launched_devices([])


def test_the_processes_of_each_node_meet_at_an_address_of_their_own() -> None:
    def name(**changes: str) -> str:
        node = launched_node(LAUNCH | changes)
        assert node is not None, "it was launched"
        return node.socket_name

    assert name() == name(LOCAL_RANK="3")
    others = [name(GROUP_RANK="0"), name(MASTER_PORT="1"), name(TORCHELASTIC_RESTART_COUNT="1")]
    assert len({name(), *others}) == 4
