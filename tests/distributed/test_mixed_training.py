# SPDX-License-Identifier: Apache-2.0
"""Whole runs whose pools have devices of different vendors (doubles): the results of a run on the
host, and what is refused before anything starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tandem.comm.flagcx_library import Abi
from tandem.testing.doubles import write_vendor_package
from tests.fakes.commands import Conditions, check_refusal, run_command
from tests.fakes.flagcx.build import stub_library
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

pytestmark = pytest.mark.usefixtures("doubles")

SETTINGS = (
    "trainer.total_training_steps=2",
    "trainer.n_gpus_per_node=4",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=float32",
    "trainer.device=cpu",
)
VENDORS = ("pools.actor-train.platform=npu", "pools.generate.platform=musa")
Run = Callable[..., Path]


@pytest.fixture(scope="module")
def vendors(tmp_path_factory: pytest.TempPathFactory) -> Conditions:
    """A node on which both vendors' extensions of torch are installed."""
    folder = tmp_path_factory.mktemp("vendors")
    for name in ("npu", "musa"):
        write_vendor_package(folder, name)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return Conditions(environment={"PYTHONPATH": path})


@pytest.fixture(scope="module")
def finished(
    material: Material, vendors: Conditions, tmp_path_factory: pytest.TempPathFactory
) -> Run:
    """The folder of a run, made when it is first asked for."""

    @cache
    def run(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("run")
        words = train_arguments(material, folder / "run", *SETTINGS, *arguments)
        ended = run_command(words, folder=folder, conditions=vendors)
        assert ended.code == 0, ended.stderr
        return folder / "run"

    return run


def test_a8_a_run_across_vendors_computes_what_one_on_the_host_computes(finished: Run) -> None:
    host, mixed = (repeatable(metrics_of(finished(*words))) for words in ((), VENDORS))
    assert host.keys() == mixed.keys()
    for step, metrics in host.items():
        assert metrics.keys() == mixed[step].keys()
        for name, value in metrics.items():
            assert mixed[step][name] == pytest.approx(value, abs=1e-6, rel=1e-6), name


def test_each_pool_runs_on_devices_of_its_platform(finished: Run) -> None:
    records = json.loads((finished(*VENDORS) / "placement.json").read_text())
    assert [(record["platform"], record["device"]) for record in records] == [
        ("npu", "npu:0"),
        ("npu", "npu:1"),
        ("musa", "musa:0"),
        ("musa", "musa:1"),
    ]


def test_a14_a_platform_that_no_node_has_is_refused_with_what_there_is(
    material: Material, vendors: Conditions, tmp_path: Path
) -> None:
    words = train_arguments(material, tmp_path / "run", *SETTINGS, "pools.generate.platform=mlu")
    check_refusal(
        run_command(words, folder=tmp_path, conditions=vendors),
        "pools.*.platform: this machine cannot hold the run (2 mlu and 2 cpu)",
        "Free: mlu 0 (the package torch_mlu is not installed), cpu ",
    )


@pytest.mark.parametrize(
    ("arguments", "without", "says"),
    [
        (VENDORS, ("flagcxDeviceHandleInit", "flagcxHandleInit"), "exports no function that makes"),
        (
            ("trainer.device=musa", "pools.transport=flagcx"),
            None,
            "FLAGCX_PATH",
        ),
    ],
    ids=["of an unknown version, though nobody asked for it", "asked for and not there"],
)
def test_a9_a_flagcx_that_cannot_be_used_is_refused(
    material: Material,
    vendors: Conditions,
    tmp_path: Path,
    *,
    arguments: tuple[str, ...],
    without: tuple[str, ...] | None,
    says: str,
) -> None:
    folder = tmp_path / "flagcx"
    folder.mkdir()
    if without is not None:
        folder = stub_library(Abi.DEVICE_HANDLE, without=without).parents[1]
    conditions = replace(vendors, environment={**vendors.environment, "FLAGCX_PATH": str(folder)})
    settings = (*SETTINGS, "trainer.n_gpus_per_node=2", *arguments)
    words = train_arguments(material, tmp_path / "run", *settings)
    check_refusal(run_command(words, folder=tmp_path, conditions=conditions), "flagcx", says)
