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
from tandem.testing.flagcx_stub import stub_library
from tests.distributed.fp32_metrics import differences
from tests.fakes.commands import Conditions, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

pytestmark = pytest.mark.usefixtures("doubles", "flagcx_stub")

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
    return Conditions(environment={"PYTHONPATH": path}, forked_workers=True)


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
    assert not list(differences(mixed, host))


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
        "the nodes cannot hold the run. Needed: node 0 ",
        "0 mlu (the package torch_mlu is not installed), ",
    )


@pytest.mark.parametrize(
    ("arguments", "without", "says"),
    [
        (VENDORS, ("flagcxDeviceHandleInit", "flagcxHandleInit"), "exports no function that makes"),
        pytest.param(
            ("trainer.device=musa", "pools.transport=flagcx"),
            None,
            "FLAGCX_PATH",
            marks=pytest.mark.deep,
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


def write_flagcx_plug_in(folder: Path) -> None:
    """A stand-in for FlagCX's plug-in, which torch loads by itself. Who uses it leaves a mark."""
    package, info = folder / "flagcx", folder / "flagcx-0.13.0.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flagcx\nVersion: 0.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nflagcx = flagcx:init\n")
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def init():\n"
        "    from torch.distributed import Backend\n"
        "    Backend.register_backend('flagcx', create, extended_api=True, devices=['musa'])\n"
        "def create(options, _=None):\n"
        "    from tandem.testing.doubles import make_backend\n"
        f"    Path({str(folder)!r}, 'used').touch()\n"
        "    rank, size = options.group_rank, options.group_size\n"
        "    return make_backend(options.store, rank=rank, size=size, timeout=options.timeout)\n"
    )


@pytest.mark.deep
def test_collectives_inside_a_pool_are_flagcxs_where_that_is_wanted(
    material: Material, vendors: Conditions, tmp_path: Path
) -> None:
    pool = ("trainer.device=musa", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=1")
    together = "actor_rollout_ref.hybrid_engine=True"
    words = train_arguments(material, tmp_path / "run", *SETTINGS, *pool, together)
    write_flagcx_plug_in(tmp_path)
    path = os.pathsep.join([str(tmp_path), vendors.environment["PYTHONPATH"]])
    wanted = Conditions(environment={"PYTHONPATH": path, "USE_FLAGCX": "1"})
    ended = run_command(words, folder=tmp_path, conditions=wanted)
    assert ended.code == 0, ended.stderr
    assert (tmp_path / "used").exists()
